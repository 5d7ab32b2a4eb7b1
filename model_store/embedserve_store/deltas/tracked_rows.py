"""Takes the rows that training changed from a sharded model, as a collective of all ranks.

Changes nothing in the model. Imports torch and torchrec only when called.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.deltas.column_exchange import ColumnExchange, Piece
from embedserve_store.deltas.touched_ids import TouchedIds
from embedserve_store.errors import InvalidModelError
from embedserve_store.format.manifest import Manifest
from embedserve_store.goldens.parity import least_precise
from embedserve_store.publishing.ranks import Ranks
from embedserve_store.sources.checkpoint import table_keys
from embedserve_store.sources.live_dmp import collection_of, describe_sharded, own_shards, rank
from embedserve_store.sources.rows import SOURCE_DTYPES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

WHOLE_ROWS_MAX = 10_000
"""Most rows of a table that is taken whole each time, as its changes cannot be tracked."""
_SHARDINGS = ("data_parallel", "table_wise", "column_wise", "table_column_wise", "row_wise")
_UNTRACKED_KERNEL = "dense"
"""Compute kernel whose optimizer may update rows that were not looked up."""


@dataclass(frozen=True)
class TakenRows:
    """Copies of the touched rows of one rank's shards."""

    pieces: dict[str, list[Piece]]
    """Copied rows of each shard, by table."""
    problem: str = ""
    """The reason why there are none."""

    @property
    def numbers(self) -> dict[str, NDArray[np.int64]]:
        """Row numbers by table."""
        return {table: own[0].numbers for table, own in self.pieces.items()}


class TrackedRows:
    """Rows of a sharded model that training touched since they were last taken.

    Until they are taken or set aside, tracking keeps 8 bytes on the model's device for each id that
    this rank looks up (4 if ids are int32), repeated ids included; those of the last
    ``overlap_steps`` steps are kept until the take after, and if the tracker has other consumers or
    ``auto_compact``, those of all steps since the take before these. A model whose rows are no
    longer taken must be closed, else its ids accumulate.

    Attributes:
        dtype: least precise dtype of this rank's shards; float32 if it has none.
    """

    def __init__(
        self, module: torch.nn.Module, ranks: Ranks, prefix: str = "", overlap_steps: int = 1
    ) -> None:
        """Starts tracking. To be called on all ranks before the first step.

        Args:
            module: a DistributedModelParallel that holds a sharded EmbeddingBagCollection or
                EmbeddingCollection. One TrackedRows at a time tracks a collection.
            ranks: all ranks; the caller closes them.
            prefix: selects the collection if there are several.
            overlap_steps: training steps whose lookups are taken once more, as many as the
                training pipeline looks up ahead.

        Raises:
            InvalidModelError: on all ranks. The model cannot be tracked: a table's sharding, dtype
                or name is not supported, or it is not tracked and has more than WHOLE_ROWS_MAX
                rows, or TorchRec's delta tracker cannot be used.
            ValueError: ``overlap_steps`` is negative.
        """
        if overlap_steps < 0:
            raise ValueError(f"overlap_steps is {overlap_steps}, expected 0 or more")
        self._tables, _, path = describe_sharded(module, prefix)
        self._collection = collection_of(module, prefix)
        self._is_closed = False
        self._again: dict[str, NDArray[np.int64]] = {}
        self._warned: set[str] = set()
        world_size = self._collection._env.world_size
        if world_size != ranks.count:
            raise InvalidModelError(
                f"the model is sharded over {world_size} of {ranks.count} ranks: "
                "touched rows are taken from models that are sharded over all"
            )
        plan = self._collection.module_sharding_plan
        self._plan = str(plan)
        for table in self._tables:
            if plan[table.name].sharding_type not in _SHARDINGS:
                raise InvalidModelError(
                    f"table {table.name!r}: touched rows of {plan[table.name].sharding_type} "
                    f"tables cannot be taken, but those of {', '.join(_SHARDINGS)} tables"
                )
        self._check_shards()
        self._ids = TouchedIds(module, self._collection, path, overlap_steps)
        try:
            self._whole = self._untracked(plan)
        except InvalidModelError:
            self._ids.close()
            raise
        self._exchange = ColumnExchange({t.name: plan[t.name] for t in self._tables}, ranks)

    def take(self) -> TakenRows:
        """Copies the touched rows of this rank's shards to the CPU. Not a collective.

        Weights are read as they are, so this is called between two steps, on the thread and CUDA
        stream that train. What was taken does not count as touched any more; ``take_again`` of its
        numbers reverses that. Rows that cannot be copied are set aside, as ``set_aside`` does.
        """
        try:
            pieces = self._read()
            self._ids.mark_taken()
        except Exception as error:  # ``whole_rows`` raises on all ranks: else they would wait
            reason = f"{type(error).__name__}: {error}"
            self.set_aside()  # each step adds ids, and the next copy would need more memory
            return TakenRows({}, f"touched rows cannot be taken on rank {rank()}: {reason}")
        self._again = {}
        return TakenRows(pieces)

    def whole_rows(self, taken: TakenRows) -> dict[str, tuple[NDArray[np.int64], torch.Tensor]]:
        """Returns the rows that this rank is to write, by table. A collective of all ranks.

        Returns:
            Row numbers in the table, int64 [n], unique and ascending, and the whole rows [n, dim]
            on the CPU, after the optimizer. Rows are in the dtype of training, except that bfloat16
            becomes float32. No row is returned on two ranks. Tables without touched rows are left
            out.

        Raises:
            InvalidModelError: on all ranks. Ranks recorded different ids of a column-wise table.
            StoreError: on all ranks. A rank could not take its rows.
        """
        return self._exchange.whole_rows(taken.pieces, taken.problem)

    def take_again(self, numbers: Mapping[str, NDArray[np.int64]]) -> None:
        """Adds rows to those that the next ``take`` copies. Not a collective.

        Rows of an earlier call stay until then, too.

        Args:
            numbers: row numbers by table, at least those of this rank's shards. Ranks that hold
                columns of a table have the same.
        """
        for table, added in numbers.items():
            self._again[table] = np.union1d(self._again.get(table, added), added)

    def set_aside(self) -> None:
        """Frees what tracking keeps on the device, without a copy of rows. Not a collective.

        The numbers of the touched rows stay on the CPU, and the next ``take`` copies these rows,
        too. Raises nothing: what cannot be set aside stays on the device.
        """
        try:
            ids = self._ids.read()
            self.take_again(
                {
                    table: _numbers(self._in_range(table, ids[table], shards), shards[0][0])
                    for table, shards in self._shards().items()
                    if shards and table in ids and table not in self._whole
                }
            )
            self._ids.mark_taken()
        except Exception as error:
            logger.warning("touched rows stay on the device: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Stops tracking. Not a collective; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._ids.close()

    def _read(self) -> dict[str, list[Piece]]:
        """Returns the touched rows of this rank's shards, by table."""
        import torch

        if str(self._collection.module_sharding_plan) != self._plan:
            raise InvalidModelError(
                "the tables were resharded, and which rows training touched before is lost: push "
                "before reshard(), and make another DeltaWriter after it"
            )
        ids, found = self._ids.read(), {}
        for table, shards in self._shards().items():
            if not shards:
                continue
            own = ids.get(table)
            if own is not None:
                own = self._in_range(table, own, shards)
            if table in self._whole:
                own = torch.arange(len(shards[0][2]))
            elif table in self._again:
                own = _with_again(own, self._again[table], shards)
            if own is None or not len(own):
                continue
            found[table] = [
                Piece(_numbers(own, row), column, _rows(shard, own))
                for row, column, shard in sorted(shards, key=lambda shard: shard[1])
            ]
        return found

    def _in_range(
        self, table: str, ids: torch.Tensor, shards: list[tuple[int, int, torch.Tensor]]
    ) -> torch.Tensor:
        """Returns ``ids`` (unique, ascending) with the first row of this rank's shards in place of
        those outside.

        FBGEMM looks that row up for them, and so training changes it; only for -1 it raises, on the
        CPU. It corrects int64 ids before they are recorded, but of other ids only a copy.
        """
        import torch

        first, _, shard = shards[0]
        rows = len(shard)
        if not rows:
            return ids[:0]
        outside = [id_ for id_ in (int(ids[0]), int(ids[-1])) if not 0 <= id_ < rows]
        if not outside:
            return ids
        if table not in self._warned:
            self._warned.add(table)
            logger.warning(
                "table %r: id %d was looked up on rank %d, whose shard has %d rows from row %d on; "
                "FBGEMM looks up the first of them instead. Further such ids are not logged",
                table,
                outside[0],
                rank(),
                rows,
                first,
            )
        looked_up: torch.Tensor = torch.where((ids >= 0) & (ids < rows), ids, 0).unique()
        return looked_up

    def _shards(self) -> dict[str, list[tuple[int, int, torch.Tensor]]]:
        """Returns first row, first column and weights of this rank's shards, by table."""
        state = self._collection.state_dict()  # writes back what is cached on a device
        return {key.name: list(own_shards(key.name, state[key.key])) for key in table_keys(state)}

    def _check_shards(self) -> None:
        import torch

        self.dtype = SOURCE_DTYPES[0]
        for table, shards in self._shards().items():
            for _, _, shard in shards:
                dtype = str(shard.dtype).removeprefix("torch.")
                if not isinstance(shard, torch.Tensor) or dtype not in SOURCE_DTYPES:
                    raise InvalidModelError(
                        f"table {table!r} has a {type(shard).__name__} of {dtype}: expected a "
                        f"tensor of {', '.join(SOURCE_DTYPES)}"
                    )
                self.dtype = least_precise(self.dtype, dtype)

    def _untracked(self, plan: Any) -> frozenset[str]:
        """Returns the tables that are taken whole each time.

        Raises:
            InvalidModelError: one of them has more than WHOLE_ROWS_MAX rows.
        """
        whole = set()
        for table in self._tables:
            sharding = plan[table.name]
            if sharding.sharding_type == "data_parallel":
                reason = "is data_parallel"
            elif sharding.compute_kernel == _UNTRACKED_KERNEL:
                reason = "has a dense kernel"
            elif table.name not in self._ids.tables:
                reason = "shares a feature with another table, or is skipped by the tracker"
            else:
                continue
            if table.num_embeddings > WHOLE_ROWS_MAX:
                raise InvalidModelError(
                    f"table {table.name!r} {reason}, so which of its rows training touched is not "
                    f"tracked, and its {table.num_embeddings} rows are more than the "
                    f"{WHOLE_ROWS_MAX} that are taken whole each time"
                )
            whole.add(table.name)
        return frozenset(whole)


def check_same_tables(module: torch.nn.Module, prefix: str, base: Manifest) -> None:
    """Raises InvalidModelError unless ``module`` has the tables of the version ``base``."""
    trained = {table.name: table for table in describe_sharded(module, prefix)[0]}
    published = {table.name: table for table in base.tables}
    for name in published.keys() | trained.keys():
        shapes = [
            f"[{one.num_embeddings}, {one.embedding_dim}]" if one else "missing"
            for one in (trained.get(name), published.get(name))
        ]
        if shapes[0] != shapes[1]:
            raise InvalidModelError(
                f"table {name!r} is {shapes[0]} in training and {shapes[1]} in version "
                f"{base.version} of {base.model!r}"
            )


def _with_again(
    ids: torch.Tensor | None,
    numbers: NDArray[np.int64],
    shards: list[tuple[int, int, torch.Tensor]],
) -> torch.Tensor:
    """Returns ``ids`` of this rank's shards and those of ``numbers`` that lie in them, unique and
    ascending."""
    import torch

    first, _, shard = shards[0]
    own = torch.from_numpy(numbers[(numbers >= first) & (numbers < first + len(shard))] - first)
    return own if ids is None else torch.cat([ids, own.to(ids)]).unique()


def _numbers(ids: torch.Tensor, first: int) -> NDArray[np.int64]:
    """Returns the row numbers of ``ids`` of a shard that begins at the row ``first``."""
    return ids.cpu().numpy().astype(np.int64) + first


def _rows(shard: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the rows ``ids`` of ``shard`` on the CPU; bfloat16 as float32."""
    import torch

    rows = shard.detach().index_select(0, ids.to(shard.device)).cpu()
    return rows.float() if rows.dtype == torch.bfloat16 else rows
