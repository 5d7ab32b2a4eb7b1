"""A gate that holds up work off the event loop."""

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
HOLD_S_MAX = 60


class Gate:
    """A gate that is closed until ``opened`` is set.

    Attributes:
        threads: threads that reached the gate, one entry for each call.
    """

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.threads: list[threading.Thread] = []

    def before(self, work: Callable[P, T]) -> Callable[P, T]:
        """Returns ``work`` with a wait at the gate before it."""

        def wait_and_work(*args: P.args, **kwargs: P.kwargs) -> T:
            self.threads.append(threading.current_thread())
            assert self.opened.wait(HOLD_S_MAX)
            return work(*args, **kwargs)

        return wait_and_work
