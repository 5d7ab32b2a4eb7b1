"""Flag of a followed version, in memory that all processes of a server share.

It is apart from the status, which only the applier writes.
"""

from __future__ import annotations

from embedserve.deltas.version_memory import VersionMemory


class SharedFlag:
    """One byte, so that no lock is needed. It outlives each process but the supervisor."""

    def __init__(self, memory: VersionMemory | None = None) -> None:
        """
        Args:
            memory: as in LiveRows.
        """
        self._memory = (memory or VersionMemory.create()).take(1)

    @property
    def is_set(self) -> bool:
        return bool(self._memory[0])

    def set(self, is_set: bool) -> None:
        self._memory[0] = is_set
