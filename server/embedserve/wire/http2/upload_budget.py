"""The room for large uploads, shared by all connections of a process.

Every stream has a window that small requests fit into. What a larger one needs beyond it is granted
from a common budget, in turn, and not while a model's queue is full: what waits stays with its
sender. What was granted comes back as its stream ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Grant = Callable[[int], bool]
"""Takes so many bytes; False if they are not needed any more."""


class UploadBudget:
    """A budget of bytes, and who waits for some of it."""

    def __init__(self, bytes_max: int, is_open: Callable[[], bool]) -> None:
        """
        Args:
            bytes_max: granted at a time; one who wants more than all gets it alone.
            is_open: False while nothing is to be granted; ``retry`` when that changes.
        """
        self._left = self._bytes_max = bytes_max
        self._is_open = is_open
        self._waiting: deque[tuple[int, Grant]] = deque()

    def request(self, nbytes: int, grant: Grant) -> None:
        """Has ``grant`` called with ``nbytes``, now or when it is its turn."""
        self._waiting.append((nbytes, grant))
        self.retry()

    def give_back(self, nbytes: int) -> None:
        self._left += nbytes
        self.retry()

    def retry(self) -> None:
        """Grants what is there to those who wait."""
        while self._waiting and self._is_open():
            nbytes, grant = self._waiting[0]
            if nbytes > self._left and self._left < self._bytes_max:
                return
            self._waiting.popleft()
            self._left -= nbytes
            if not grant(nbytes):
                self._left += nbytes
