"""Records changes of a store in its history. Never imports torch.

A change is recorded once it has been made. If the record cannot be written, the change stays, and
a warning says that it is missing in the history.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from datetime import UTC, datetime

from embedserve_store.errors import StoreError
from embedserve_store.format.event import HISTORY_FOLDER, Event
from embedserve_store.publishing.added_file import user, writer

logger = logging.getLogger(__name__)


def record_event(
    store: str | os.PathLike[str],
    what: str,
    model: str,
    versions: Sequence[int],
    *,
    who: str | None = None,
    source: str = "",
    detail: str = "",
) -> None:
    """Adds a change to the history of ``store``. Logs a warning if that fails.

    Args:
        what, versions, source, detail: see Event.
        who: author. Default: EMBEDSERVE_BY, or else USER@HOST.
    """
    where = os.fspath(store)
    now = datetime.now(UTC)
    event = Event(
        what=what,
        model=model,
        versions=tuple(versions),
        who=user() if who is None else who,
        when=now.isoformat(timespec="seconds"),
        host=socket.gethostname(),
        source=source,
        detail=detail,
    )
    name = f"{now:%Y%m%dT%H%M%S%f}Z-{secrets.token_hex(4)}.json"
    try:
        folder = f"{HISTORY_FOLDER}/{model}"
        writer(where, folder)(f"{folder}/{now:%Y-%m-%d}/{name}", event.to_bytes())
    except StoreError as error:
        logger.warning("%s of %s is done, but missing in the history: %s", what, model, error)
