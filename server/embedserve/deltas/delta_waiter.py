"""Lets the applier wait between two polls for deltas, until another thread wakes it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embedserve_store.deltas.notify.channel import Topic


class DeltaWaiter:
    """Wait of the applier's loop, which another thread may end early."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_woken = threading.Event()
        self._topics: set[Topic] = set()

    def announce(self, topics: Iterable[Topic]) -> None:
        """Announces that the lines of ``topics`` may have new deltas; in any thread."""
        with self._lock:
            self._topics.update(topics)
        self.wake()

    def wake(self) -> None:
        """Ends the wait; in any thread."""
        self._is_woken.set()

    def wait(self, seconds: float) -> bool:
        """Waits for ``seconds`` at most, and returns whether it was woken."""
        return self._is_woken.wait(seconds)

    def take(self) -> set[Topic]:
        """Returns the topics that were announced since the last call. The next wait is a new
        one."""
        self._is_woken.clear()
        with self._lock:
            topics, self._topics = self._topics, set()
        return topics
