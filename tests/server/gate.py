"""Keeps work that is done beside the event loop waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
HOLD_S_MAX = 60


class Gate:
    """Closed until ``opened`` is set.

    Attributes:
        threads: that came to it, one for each piece of work.
    """

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.threads: list[threading.Thread] = []

    def before(self, work: Callable[P, T]) -> Callable[P, T]:
        """``work``, but held up here."""

        def wait_and_work(*args: P.args, **kwargs: P.kwargs) -> T:
            self.threads.append(threading.current_thread())
            assert self.opened.wait(HOLD_S_MAX)
            return work(*args, **kwargs)

        return wait_and_work
