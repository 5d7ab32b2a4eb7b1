"""Keeps the changed rows of a version on a GPU, behind the rows of its tables.

They are copies of the spare rows that deltas/live_rows.py lays out in this host's memory, and have
the same row numbers. A lookup may use a view once the rows of that view are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.row_groups import RowGroup
from embedserve.engine.cuda_limits import ROWS_MAX
from embedserve.engine.gpu_pages import GpuPages
from embedserve.engine.gpus import WORK_BYTES
from embedserve.engine.kernel_rows import place_shards
from embedserve_store.errors import StoreError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import row_pitch

BLOCK_BYTES = 16 << 20
"""Bytes of changed rows that are copied at once, through pinned memory."""


@dataclass
class _Target:
    """Location of the spare rows of a table on the GPU.

    Attributes:
        rows: uint8 [n, pitch], the spare rows on the GPU.
        attached: address up to which the table's addresses have memory.
    """

    rows: torch.Tensor
    attached: int


class GpuSpareRows:
    """Spare rows of one version on one GPU."""

    def __init__(self, live: LiveRows, device: torch.device) -> None:
        """Allocates the memory of all changed rows that ``live`` may have.

        Raises:
            StoreError: the GPU does not have that much memory, or a table would have more rows than
                its kernels can number.
        """
        self._live = live
        for group in live.table_groups:
            _check_numbers(group)
        self._pages = GpuPages(device)
        _check_room(live, device, self._pages.page_bytes)
        self._pages.allocate(changed_bytes_max(live, self._pages.page_bytes))
        self._targets: dict[str, _Target] = {}
        self._view = 0
        self._stream = torch.cuda.Stream(device)

    def reserve(self, kernel: Any, config: Any) -> None:
        """Gives ``kernel`` memory for its tables, with addresses for their spare rows behind each.

        Args:
            kernel: FBGEMM's kernel, without rows.
            config: torchrec's configuration of its tables, which are whole.
        """
        pages = self._pages
        tables = self._with_groups(config)
        sizes = [
            _round_up(pitch_of(table) * (group.first_row + group.count), pages.page_bytes)
            for table, group in tables
        ]
        *offsets, total = accumulate(sizes, initial=0)
        address = pages.reserve(total)
        ends = []
        for (table, _), offset in zip(tables, offsets, strict=True):
            size = _round_up(pitch_of(table) * table.num_embeddings, pages.page_bytes)
            pages.attach_new(address + offset, size)
            ends.append(address + offset + size)
        data = pages.tensor(address, total)
        kernel.weights_dev, kernel.dev_size = data, total
        place_shards(kernel, offsets)
        for (table, group), offset, attached in zip(tables, offsets, ends, strict=True):
            pitch, count = pitch_of(table), group.count
            start = offset + group.first_row * pitch
            rows = data.narrow(0, start, count * pitch).view(count, pitch)
            self._targets[table.name] = _Target(rows, attached)

    def _with_groups(self, config: Any) -> list[tuple[TableSpec, RowGroup]]:
        """Returns the tables of a kernel, each with its group."""
        found = {
            table.name: (table, one) for one in self._live.table_groups for table in one.tables
        }
        return [found[one.name] for one in config.embedding_tables]

    def upload(self, view: int) -> None:
        """Copies the rows that were written since the last call. Returns when they are copied.

        Args:
            view: a committed view whose rows are not overwritten meanwhile.
        """
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for group, written in self._live.written_since(self._view):
                for table in group.tables:
                    rows, target = self._live.rows[table.name], self._targets[table.name]
                    self._attach(target, int(written[-1]) + 1)
                    for block in _blocks(written, target.rows.shape[1]):
                        _copy(rows[block], target.rows, block)
            self._stream.synchronize()
        # The view after an undo is an earlier one, whose rows are there already.
        self._view = max(self._view, view)

    def _attach(self, target: _Target, rows: int) -> None:
        """Attaches memory to the first ``rows`` spare rows of a table."""
        end = target.rows.data_ptr() + rows * target.rows.shape[1]
        if end > target.attached:
            # The pages between the table and its first spare row stay without memory.
            page_bytes = self._pages.page_bytes
            first = max(target.attached, target.rows.data_ptr() // page_bytes * page_bytes)
            size = _round_up(end - first, page_bytes)
            self._pages.attach(first, size)
            target.attached = first + size


def _copy(rows: NDArray[np.uint8], target: torch.Tensor, positions: NDArray[np.int64]) -> None:
    """Copies ``rows``, uint8 [n, bytes], to ``positions`` of ``target``, uint8 [m, pitch] on a GPU,
    in the current stream."""
    pitch = target.shape[1]
    padded = torch.zeros((len(rows), pitch), dtype=torch.uint8, pin_memory=True)
    padded.numpy()[:, : rows.shape[1]] = rows
    numbers = torch.from_numpy(positions).pin_memory()
    # In words of 8 bytes the GPU copies a row faster.
    words = padded.to(target.device, non_blocking=True).view(torch.int64)
    where = numbers.to(target.device, non_blocking=True)
    target.view(torch.int64).index_copy_(0, where, words)


def changed_bytes_max(live: LiveRows, page_bytes: int) -> int:
    """Returns the bytes of a GPU that all changed rows may take: those of this host's memory, with
    each row padded, and up to two pages more for each table."""
    padded = max(sum(map(pitch_of, one.tables)) / one.spare_bytes for one in live.table_groups)
    tables = sum(len(one.tables) for one in live.table_groups)
    return int(live.memory_max * padded) + 2 * page_bytes * tables


def pitch_of(table: TableSpec) -> int:
    """Returns the bytes from one row of ``table`` to the next on a GPU."""
    return row_pitch(table.row_bytes, "cuda")


def _check_numbers(group: RowGroup) -> None:
    if group.first_row + group.count > ROWS_MAX:
        raise StoreError(
            f"{group.names}: {group.row_count} rows, and room for {group.count} changed ones: on "
            f"CUDA torchrec casts ids to int32, so tables have at most {ROWS_MAX} rows; give less "
            "memory for deltas, or serve it on the CPU"
        )


def _check_room(live: LiveRows, device: torch.device, page_bytes: int) -> None:
    tables = [table for group in live.table_groups for table in group.tables]
    nbytes = sum(_round_up(pitch_of(one) * one.num_embeddings, page_bytes) for one in tables)
    changed, free = changed_bytes_max(live, page_bytes), torch.cuda.mem_get_info(device)[0]
    if nbytes + changed + WORK_BYTES > free:
        raise StoreError(
            f"{live.version.path}: {nbytes:,} bytes of tables and {changed:,} for changed rows do "
            f"not fit on {device}, which has {free:,} free, {WORK_BYTES:,} of them for batches: "
            "give less memory for deltas, or serve them on the CPU"
        )


def _blocks(positions: NDArray[np.int64], pitch: int) -> Iterator[NDArray[np.int64]]:
    step = max(1, BLOCK_BYTES // pitch)
    return (positions[start : start + step] for start in range(0, len(positions), step))


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
