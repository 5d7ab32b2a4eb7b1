"""Hold of a followed line, in memory that all processes of a server share.

It is apart from the status, which only the applier writes.
"""

from __future__ import annotations

import mmap


class DeltaHold:
    """Request of an administrator that no further delta is applied.

    Any worker sets it, and the applier reads it at each look. It is one byte, so that no lock is
    needed. The memory is allocated before the processes are forked, and outlives each of them.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    @property
    def is_set(self) -> bool:
        return self._memory[0] != 0

    def set(self, is_set: bool) -> None:
        self._memory[0] = is_set
