"""Reads the rows of a table that is stored in files as rectangles, with preadv.

A whole table in a file is one rectangle. A sharded table is many: row-wise, column-wise or both.
Nothing is mapped or cached, so private memory holds only the requested rows. This module does not
parse files; checkpoint readers pass the positions of the values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError, reading
from embedserve_store.format.regular_file import stat_regular

if TYPE_CHECKING:
    import torch

_BUFFER_BYTES = 4 << 20
"""Maximum size in bytes of the buffer for rectangles that do not span whole rows. The buffer holds
at least one row."""
RECTANGLES_MAX = 100_000
"""Maximum rectangles of a table. A view in a tiny file may have a rectangle for each of any number
of columns."""


@dataclass(frozen=True)
class SourceFile:
    """A file, identified as it was when its table was found."""

    path: Path
    size: int
    identity: tuple[int, int, int]
    """Device, inode and modification time in nanoseconds. A changed file differs here."""

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        """Returns the file at ``path``. Raises StoreError if it cannot be read, or is no regular
        file."""
        with reading(path):
            stat_regular(path)
        with _opened(path) as fd:
            return cls(path, os.fstat(fd).st_size, _identity(fd))

    @contextmanager
    def open(self) -> Iterator[int]:
        """Opens the file and yields its descriptor.

        Raises:
            StoreError: the file cannot be read, or has changed.
        """
        with _opened(self.path) as fd:
            if (os.fstat(fd).st_size, _identity(fd)) != (self.size, self.identity):
                raise StoreError(f"{self.path}: changed while it was read")
            yield fd


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    with reading(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _identity(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_mtime_ns


@dataclass(frozen=True)
class Rectangle:
    """Rows [row, row + rows) and columns [column, column + columns) of a table in a file."""

    file: SourceFile
    offset: int
    """Byte offset in the file of the rectangle's first value."""
    stride: int
    """Bytes from one row to the next. The values of a row are contiguous."""
    row: int
    rows: int
    column: int
    columns: int

    @property
    def end_row(self) -> int:
        return self.row + self.rows

    @property
    def end_column(self) -> int:
        return self.column + self.columns

    def span(self, rows: int, itemsize: int) -> int:
        """Returns the bytes from the first value of ``rows`` rows to the end of the last value."""
        return (rows - 1) * self.stride + self.columns * itemsize if rows else 0


def check_tiling(rectangles: Sequence[Rectangle], shape: tuple[int, int], where: str) -> None:
    """Raises StoreError unless the rectangles cover every value of ``shape`` exactly once."""
    rows, columns = shape
    starts: dict[int, list[Rectangle]] = {}
    for part in rectangles:
        if part.end_row > rows or part.end_column > columns or min(part.row, part.column) < 0:
            raise StoreError(
                f"{where}: a shard has rows {part.row} to {part.end_row - 1} and columns "
                f"{part.column} to {part.end_column - 1}, the table has shape {list(shape)}"
            )
        starts.setdefault(part.row, []).append(part)
    bounds = sorted({0, rows, *starts, *(part.end_row for part in rectangles)})
    active: list[Rectangle] = []
    for top, bottom in pairwise(bounds):
        active = [part for part in active if part.end_row > top] + starts.get(top, [])
        _check_band(active, columns, f"{where}: rows {top} to {bottom - 1}")


def _check_band(active: list[Rectangle], columns: int, where: str) -> None:
    """Checks a band of rows between two bounds.

    Every active rectangle spans the whole band, so only the columns need a check.
    """
    reached = 0
    for part in sorted(active, key=lambda part: part.column):
        if part.column < reached:
            raise StoreError(f"{where}: columns {part.column} to {reached - 1} are there twice")
        if part.column > reached:
            break
        reached = part.end_column
    if reached < columns:
        raise StoreError(f"{where}: the values from column {reached} on are not there")


class FileRows:
    """Rows of a table in files, as TableRows."""

    def __init__(
        self, rectangles: Iterable[Rectangle], shape: tuple[int, int], dtype: str, where: str
    ) -> None:
        """Checks the rectangles of a table.

        Args:
            rectangles: rectangles that tile ``shape``.
            dtype: torch's name of the values' dtype.

        Raises:
            StoreError: the rectangles are too many or do not tile the table, or a file ends early.
        """
        import torch

        self.shape = shape
        self.dtype = dtype
        self._torch_dtype: torch.dtype = getattr(torch, dtype)
        self._itemsize = self._torch_dtype.itemsize
        parts = (part for part in rectangles if part.rows and part.columns)
        self._rectangles = tuple(islice(parts, RECTANGLES_MAX + 1))
        if len(self._rectangles) > RECTANGLES_MAX:
            raise StoreError(
                f"{where}: its values lie in more than {RECTANGLES_MAX:,} pieces: save the tensor "
                "contiguous"
            )
        check_tiling(self._rectangles, shape, where)
        for part in self._rectangles:
            if part.offset + part.span(part.rows, self._itemsize) > part.file.size:
                raise StoreError(f"{where}: {part.file.path} is truncated: its values go beyond")

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Implements TableRows.read: one preadv per range of whole rows, into the result."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"rows {start} to {stop} of {self.shape[0]}")
        out = self._empty(stop - start)
        for part in self._rectangles:
            first, last = max(start, part.row), min(stop, part.end_row)
            if first < last:
                with part.file.open() as fd:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                    self._read_rows(fd, part, first, out[first - start : last - start])
        return out

    def gather(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Implements TableRows.gather row by row, each once, which suits a few hundred rows."""
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.shape[0]:
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of {self.shape[0]}")
        distinct, places = np.unique(numbers, return_inverse=True)
        out = self._empty(len(distinct))
        for part in self._rectangles:
            wanted = np.flatnonzero((distinct >= part.row) & (distinct < part.end_row))
            with ExitStack() as stack:
                fd = stack.enter_context(part.file.open()) if len(wanted) else -1
                for i in wanted.tolist():
                    self._read_rows(fd, part, int(distinct[i]), out[i : i + 1])
        return out[places]

    def _empty(self, rows: int) -> torch.Tensor:
        import torch

        return torch.empty(rows, self.shape[1], dtype=self._torch_dtype)

    def _read_rows(self, fd: int, part: Rectangle, first: int, out: torch.Tensor) -> None:
        """Fills the rectangle's columns of ``out`` with the table's rows from ``first`` on."""
        import torch

        width = self.shape[1] * self._itemsize
        if part.columns == self.shape[1] and part.stride == width:
            self._fill(fd, part, first, out)
            return
        step = max(1, _BUFFER_BYTES // max(part.stride, part.columns * self._itemsize))
        values = part.stride // self._itemsize
        for begin in range(0, len(out), step):
            rows = min(step, len(out) - begin)
            count = part.span(rows, self._itemsize) // self._itemsize
            buffer = torch.empty(count, dtype=self._torch_dtype)
            self._fill(fd, part, first + begin, buffer)
            strided = buffer.as_strided((rows, part.columns), (values, 1))
            out[begin : begin + rows, part.column : part.end_column] = strided

    def _fill(self, fd: int, part: Rectangle, first: int, out: torch.Tensor) -> None:
        """Reads the bytes of ``out`` from row ``first`` of the rectangle on."""
        import torch

        view = out.view(-1).view(torch.uint8).numpy().data
        offset = part.offset + (first - part.row) * part.stride
        while view:
            with reading(part.file.path):
                count = os.preadv(fd, [view], offset)
            if not count:
                raise StoreError(f"{part.file.path}: is truncated")
            view = view[count:]
            offset += count


class LazyTensors(Mapping[str, FileRows]):
    """The 2-D floating-point tensors of a checkpoint, by full key.

    The values of a tensor are found in the files when it is requested, so that a damaged tensor
    that is not published does no harm.
    """

    def __init__(self, finders: Mapping[str, Callable[[], FileRows]]) -> None:
        """
        Args:
            finders: find the values of each tensor, or raise StoreError.
        """
        self._finders = finders

    def __getitem__(self, key: str) -> FileRows:
        return self._finders[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._finders)

    def __contains__(self, key: object) -> bool:
        return key in self._finders

    def __len__(self) -> int:
        return len(self._finders)
