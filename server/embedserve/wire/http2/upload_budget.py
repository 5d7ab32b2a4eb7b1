"""Flow-control budget for large request bodies, shared by all connections of a process.

Every stream has a window that small requests fit into. Window beyond it is granted from a common
budget in FIFO order, and not while a model's queue is full. Until then the data stays with the
client. The window of a connection may be granted bytes, too. A stream returns its granted bytes at
its end at the latest, a connection once the bytes that it holds fit into its usual window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

OnGrant = Callable[[int], bool]
"""Callback that takes the granted bytes. Returns False if they are no longer needed."""
IsNeeded = Callable[[], bool]
"""Returns whether a request that waits is still needed: its stream may have ended meanwhile."""
WAITING_MIN = 128
"""Requests that wait, from which those that are no longer needed are dropped."""


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
        self._waiting: deque[tuple[int, OnGrant, IsNeeded]] = deque()
        self._waiting_max = WAITING_MIN

    def request(self, nbytes: int, grant: OnGrant, is_needed: IsNeeded) -> None:
        """Queues a request for ``nbytes``; calls ``grant`` with it, now or later in FIFO order.

        It is dropped without a call at any time once ``is_needed`` returns False.
        """
        self._waiting.append((nbytes, grant, is_needed))
        if len(self._waiting) > self._waiting_max:
            self._waiting = deque([one for one in self._waiting if one[2]()])
            self._waiting_max = max(WAITING_MIN, 2 * len(self._waiting))
        self.retry()

    def give_back(self, nbytes: int) -> None:
        """Returns granted bytes to the budget."""
        self._left += nbytes
        self.retry()

    def retry(self) -> None:
        """Grants pending requests as far as the budget reaches."""
        while self._waiting and self._is_open():
            nbytes, grant, _ = self._waiting[0]
            if nbytes > self._left and self._left < self._bytes_max:
                return
            self._waiting.popleft()
            self._left -= nbytes
            if not grant(nbytes):
                self._left += nbytes
