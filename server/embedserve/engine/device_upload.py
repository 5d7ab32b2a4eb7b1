"""Uploads rows of the mapped file to devices. Each device has two pinned buffers and a thread.

While one buffer is copied to the device the other is filled. In addition to the page cache, the
upload uses no more host memory than these buffers.
With the CPU as the device the same code runs without streams and pinned memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray

from embedserve.engine.cuda_limits import check_half_range
from embedserve_store.format.table_spec import CODES_MAX, SCALE_BIAS_BYTES, TableSpec
from embedserve_store.memory.mapped_tables import drop_pages

logger = logging.getLogger(__name__)

BUFFER_BYTES = 64 << 20
BUFFERS = 2
"""Pinned buffers of each device: one is filled while the other is copied."""
PROGRESS_S = 5.0
"""Seconds between two progress lines of the log."""


@dataclass(frozen=True)
class RowCopy:
    """Rows of a shard, and the memory that they are copied to.

    Attributes:
        table: table of the rows.
        first_row: index of the first row in ``table``.
        stored: uint8 [rows, bytes], the rows as stored in the file.
        is_mapped: whether ``stored`` is a file mapping, whose pages may be dropped.
        parts: uint8 [rows, bytes] each, views of ``stored`` that go side by side into the target.
        target: uint8 [rows, pitch]; its rows may be longer than the parts together.
    """

    table: TableSpec
    first_row: int
    stored: NDArray[np.uint8]
    is_mapped: bool
    parts: tuple[torch.Tensor, ...]
    target: torch.Tensor

    def blocks(self, block_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields (first, count) of blocks of rows, each at most ``block_bytes`` of the target but
        at least one row."""
        rows, pitch = self.target.shape
        step = max(1, block_bytes // pitch)
        return ((row, min(step, rows - row)) for row in range(0, rows, step))

    def fill(self, block: torch.Tensor, first: int) -> None:
        """Writes the rows from ``first`` on to ``block``, uint8 [count, pitch] in this host's
        memory, and pads each row with zeros."""
        column = 0
        for part in self.parts:
            width = part.shape[1]
            block.narrow(1, column, width).copy_(part.narrow(0, first, len(block)))
            column += width
        block[:, column:] = 0

    def check(self, first: int, count: int) -> None:
        """Raises StoreError if GPUs cannot serve one of these rows."""
        if self.table.dtype in CODES_MAX:
            heads = self.stored[first : first + count, :SCALE_BIAS_BYTES]
            start = self.first_row + first
            check_half_range(heads, self.table, range(start, start + count))

    def release(self, first: int, count: int) -> None:
        """Drops the mapped pages of these rows, which are not read again."""
        if self.is_mapped:
            drop_pages(self.stored[first : first + count])


def copy_all(
    groups: Sequence[Sequence[RowCopy]], what: str, buffer_bytes: int = BUFFER_BYTES
) -> None:
    """Copies each group of rows to its device, in a separate thread for each group. The log reports
    the progress under the name ``what``. Returns when all copies are complete.

    Raises:
        StoreError: a row that GPUs cannot serve.
    """
    progress = _Progress(what, sum(one.target.numel() for group in groups for one in group))
    with ThreadPoolExecutor(len(groups), thread_name_prefix="load") as threads:
        running = [threads.submit(_copy_group, one, progress, buffer_bytes) for one in groups]
        for copied in running:
            copied.result()
    progress.log()


def _copy_group(group: Sequence[RowCopy], progress: _Progress, buffer_bytes: int) -> None:
    buffer_bytes = min(buffer_bytes, max(one.target.numel() for one in group))
    buffer_bytes = max(buffer_bytes, *(one.target.shape[1] for one in group))
    try:
        with _Buffers(group[0].target.device, buffer_bytes) as buffers:
            for copy in group:
                for first, count in copy.blocks(buffer_bytes):
                    if progress.is_over:
                        return
                    copy.check(first, count)
                    buffers.copy(copy, first, count)
                    copy.release(first, count)
                    progress.add(count * copy.target.shape[1])
    except BaseException:
        progress.is_over = True
        raise


class _Buffers:
    """Pinned buffers of one device, used in turn. Leaving the context waits until all copies are
    complete."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        is_cuda = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if is_cuda:
            torch.cuda.synchronize(device)  # FBGEMM zeroes targets on the default stream
            self._stream = torch.cuda.Stream(device)
        buffers = [
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(BUFFERS)
        ]
        self._turns = cycle([(one, torch.cuda.Event() if is_cuda else None) for one in buffers])

    def __enter__(self) -> _Buffers:
        return self

    def copy(self, copy: RowCopy, first: int, count: int) -> None:
        """Starts the copy of the rows, which may be incomplete when the method returns."""
        buffer, copied = next(self._turns)
        if copied is not None:
            copied.synchronize()  # waits for the buffer's previous copy
        pitch = copy.target.shape[1]
        block = buffer[: count * pitch].view(count, pitch)
        copy.fill(block, first)
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            copy.target.narrow(0, first, count).copy_(block, non_blocking=True)
        if copied is not None:
            copied.record(self._stream)

    def __exit__(self, *of_error: object) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class _Progress:
    """Progress of the copies of all threads, logged every PROGRESS_S.

    Attributes:
        is_over: whether a thread failed, so that the others stop.
    """

    def __init__(self, what: str, nbytes: int) -> None:
        self.is_over = False
        self._what = what
        self._all_bytes = nbytes
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._start_s = self._logged_s = time.perf_counter()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done_bytes += nbytes
            now_s = time.perf_counter()
            is_due = now_s - self._logged_s >= PROGRESS_S
            if is_due:
                self._logged_s = now_s
        if is_due:
            self.log()

    def log(self) -> None:
        seconds = time.perf_counter() - self._start_s
        logger.info(
            "%s: copied %.2f of %.2f GB to its devices in %.1f s, %.1f GB/s",
            self._what,
            self._done_bytes / 1e9,
            self._all_bytes / 1e9,
            seconds,
            self._done_bytes / 1e9 / max(seconds, 1e-9),
        )
