"""Computes the SHA-256 of each part's rows while the rows of the tables are written.

Never imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from embedserve_store.plans.host_plan import HostPlan


class PartDigests:
    """Digests of the parts of a host plan. Receives the rows of a table in order, in blocks."""

    def __init__(self, hosts: HostPlan) -> None:
        self._hosts = hosts
        self._rows_done = dict.fromkeys(hosts.rows, 0)
        self._digests = {
            name: [hashlib.sha256() for _ in range(hosts.parts)] for name in hosts.rows
        }

    def is_divided(self, name: str) -> bool:
        """Returns whether several parts have rows of a table."""
        return len(set(self._hosts.rows[name])) > 2

    def update(self, name: str, block: NDArray[np.uint8]) -> None:
        """Adds the next rows of a table, uint8 [rows, row_bytes]."""
        start = self._rows_done[name]
        self._rows_done[name] += len(block)
        for part, digest in enumerate(self._digests[name]):
            rows = self._hosts.rows_on(name, part)
            own = block[max(0, rows.start - start) : max(0, rows.stop - start)]
            digest.update(own.data)

    def checksums(self, whole: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        """Returns the hexadecimal SHA-256 of each part's rows, by table.

        Args:
            whole: SHA-256 of each table. Tables that are whole on a part need no ``update``.
        """
        found = {}
        for name, digests in self._digests.items():
            is_whole = not self.is_divided(name)
            found[name] = tuple(
                whole[name] if is_whole and self._hosts.rows_on(name, part) else digest.hexdigest()
                for part, digest in enumerate(digests)
            )
        return found
