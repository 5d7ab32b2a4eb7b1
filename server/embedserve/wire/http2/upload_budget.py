"""Flow-control budget for large request bodies, shared by all connections of a process.

Every stream has a window that small requests fit into. Window beyond it is granted from a common
budget in FIFO order, and not while a model's queue is full. Until then the data stays with the
client. The window of a connection may be granted bytes, too. A stream returns its granted bytes at
its end at the latest, a connection once the bytes that it holds fit into its usual window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Grant = Callable[[int], bool]
"""Callback that takes the granted bytes. Returns False if they are no longer needed."""


class UploadBudget:
    """A byte budget with a FIFO queue of pending requests."""

    def __init__(self, bytes_max: int, is_open: Callable[[], bool]) -> None:
        """
        Args:
            bytes_max: total of outstanding grants. A larger request is granted while nothing else
                is outstanding.
            is_open: returns False while nothing may be granted; ``retry`` is called when it may.
        """
        self._left = self._bytes_max = bytes_max
        self._is_open = is_open
        self._waiting: deque[tuple[int, Grant]] = deque()

    def request(self, nbytes: int, grant: Grant) -> None:
        """Queues a request for ``nbytes``; calls ``grant`` with it, now or later in FIFO order."""
        self._waiting.append((nbytes, grant))
        self.retry()

    def give_back(self, nbytes: int) -> None:
        """Returns granted bytes to the budget."""
        self._left += nbytes
        self.retry()

    def retry(self) -> None:
        """Grants pending requests as far as the budget reaches."""
        while self._waiting and self._is_open():
            nbytes, grant = self._waiting[0]
            if nbytes > self._left and self._left < self._bytes_max:
                return
            self._waiting.popleft()
            self._left -= nbytes
            if not grant(nbytes):
                self._left += nbytes
