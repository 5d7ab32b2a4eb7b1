"""Makes the notifier of a line, if there is a broker. Without one nothing for it is imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from embedserve_store.deltas.notify.broker_url import ENVIRONMENT, Notify, read_broker_url

if TYPE_CHECKING:
    from embedserve_store.deltas.notify.notifier import DeltaNotifier


def make_notifier(notify: Notify | None, model: str, line: int) -> DeltaNotifier | None:
    """Returns the notifier of a line for ``notify``, by default for the variable ENVIRONMENT; None
    without either.

    Raises:
        StoreError: as read_broker_url.
    """
    chosen = notify or os.environ.get(ENVIRONMENT)
    if not chosen:
        return None
    read_broker_url(chosen)  # what cannot be used is an error at the start
    from embedserve_store.deltas.notify.broker import Topic
    from embedserve_store.deltas.notify.notifier import DeltaNotifier

    return DeltaNotifier(chosen, Topic(model, line))
