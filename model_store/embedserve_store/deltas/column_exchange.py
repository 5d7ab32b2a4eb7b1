"""Puts the rows of column-wise tables together from their shards, as a collective of all ranks.

Imports torch only when called.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.publishing.ranks import Ranks

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Piece:
    """Some rows of a shard of a table."""

    numbers: NDArray[np.int64]
    """Row numbers in the table [n], ascending."""
    column: int
    """The table's column at which the rows begin."""
    rows: torch.Tensor
    """Rows [n, columns] on the CPU."""


class ColumnExchange:
    """Exchanges columns between ranks, so that each row is whole on one of them.

    Ranks that hold columns of a table have the same rows. Each gets a consecutive share of them,
    and sends the columns of the other shares.
    """

    def __init__(self, plan: dict[str, Any], ranks: Ranks) -> None:
        """
        Args:
            plan: TorchRec's ParameterSharding of each table.
        """
        self._ranks = ranks
        self._columns = {
            table: columns
            for table, sharding in plan.items()
            if "column_wise" in sharding.sharding_type
            and len(columns := _columns_by_rank(sharding.sharding_spec.shards)) > 1
        }

    def whole_rows(
        self, pieces: dict[str, list[Piece]], problem: str = ""
    ) -> dict[str, tuple[NDArray[np.int64], torch.Tensor]]:
        """Returns row numbers and whole rows of each table, no row on two ranks.

        A collective of all ranks.

        Args:
            pieces: rows of this rank's shards, by table; a table's pieces have the same rows and
                are in the order of columns.
            problem: the reason why this rank has no pieces.

        Raises:
            InvalidModelError: on all ranks. The ranks have different rows of a column-wise table.
            StoreError: on all ranks. A rank has a problem.
        """
        import torch

        self._check_alike(pieces, problem)
        whole = {
            table: (own[0].numbers, torch.cat([piece.rows for piece in own], 1))
            if len(own) > 1
            else (own[0].numbers, own[0].rows)
            for table, own in pieces.items()
            if table not in self._columns
        }
        return whole | (self._exchanged(pieces) if self._columns else {})

    def _check_alike(self, pieces: dict[str, list[Piece]], problem: str) -> None:
        mine = {
            table: (len(own[0].numbers), int(own[0].numbers @ own[0].numbers))
            for table, own in pieces.items()
            if table in self._columns
        }
        reported = self._ranks.from_all((problem, mine))
        for first in (problem for problem, _ in reported if problem):
            raise StoreError(first)
        for table, columns in self._columns.items():
            sums = [reported[rank][1].get(table) for rank in columns]
            if len(set(sums)) > 1:
                counts = ", ".join(str(one[0] if one else 0) for one in sums)
                raise InvalidModelError(
                    f"table {table!r}: ranks {', '.join(map(str, columns))} looked up different "
                    f"ids of this column-wise table: {counts}"
                )

    def _exchanged(
        self, pieces: dict[str, list[Piece]]
    ) -> dict[str, tuple[NDArray[np.int64], torch.Tensor]]:
        """Returns this rank's shares of the rows of column-wise tables over several ranks."""
        import torch

        ranks = range(self._ranks.count)
        found = {table: pieces[table] for table in self._columns if table in pieces}
        outgoing = [
            [
                _as_bytes(piece.rows[_share(len(piece.numbers), self._columns[table], rank)])
                for table, own in found.items()
                if rank in self._columns[table]
                for piece in own
            ]
            for rank in ranks
        ]
        whole = {table: self._empty_share(table, own[0]) for table, own in found.items()}
        incoming = [
            [
                whole[table][1][:, column : column + width]
                for table in found
                for column, width in self._columns[table].get(rank, ())
            ]
            for rank in ranks
        ]
        sent = torch.cat([torch.empty(0, dtype=torch.uint8), *itertools.chain(*outgoing)])
        received = self._ranks.exchange(
            sent,
            [_nbytes(blocks) for blocks in outgoing],
            [_nbytes(blocks) for blocks in incoming],
        )
        blocks = list(itertools.chain(*incoming))
        for block, data in zip(blocks, received.split([b.nbytes for b in blocks]), strict=True):
            # A copy, since within ``received`` the data may not be aligned.
            block.copy_(data.clone().view(block.dtype).view(block.shape))
        return {table: share for table, share in whole.items() if len(share[0])}

    def _empty_share(self, table: str, piece: Piece) -> tuple[NDArray[np.int64], torch.Tensor]:
        """Returns the row numbers of this rank's share of a table, and room for the whole rows."""
        columns = self._columns[table]
        numbers = piece.numbers[_share(len(piece.numbers), columns, self._ranks.rank)]
        dim = sum(width for own in columns.values() for _, width in own)
        return numbers, piece.rows.new_empty(len(numbers), dim)


def _columns_by_rank(shards: Any) -> dict[int, list[tuple[int, int]]]:
    """Returns first column and number of columns of each rank's shards, in the order of columns."""
    found: dict[int, list[tuple[int, int]]] = {}
    for shard in sorted(shards, key=lambda shard: shard.shard_offsets[1]):
        columns = (shard.shard_offsets[1], shard.shard_sizes[1])
        found.setdefault(shard.placement.rank(), []).append(columns)
    return dict(sorted(found.items()))


def _share(rows: int, ranks: Iterable[int], rank: int) -> slice:
    """Returns the share of ``rows`` rows that ``rank`` gets, one of ``ranks``."""
    ordered = list(ranks)
    at, count = ordered.index(rank), len(ordered)
    return slice(rows * at // count, rows * (at + 1) // count)


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    import torch

    return rows.reshape(-1).view(torch.uint8)


def _nbytes(blocks: list[torch.Tensor]) -> int:
    return sum(block.nbytes for block in blocks)
