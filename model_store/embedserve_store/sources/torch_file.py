"""Reads the shapes and file positions of tensors that torch.save wrote, without their values.

The pickle inside is read with weights_only, so its code never runs. Only torch's zip format (since
torch 1.6) is supported. A shard in a DCP folder has the same format inside a larger file.
"""

from __future__ import annotations

import io
import re
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import StoreError, reading
from embedserve_store.sources.file_rows import FileRows, LazyTensors, Rectangle, SourceFile
from embedserve_store.sources.state_dict import split

if TYPE_CHECKING:
    import torch

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Local file header in a zip archive: signature, and lengths of file name and extra field."""


class _Slice(io.RawIOBase):
    """Bytes [start, start + length) of an open file."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        count = self._file.readinto(memoryview(buffer)[:size]) or 0
        self._position += count
        return count


class Archive:
    """An archive of torch.save: ``content`` with meta tensors, and their positions in the file."""

    def __init__(self, file: SourceFile, start: int, length: int, where: str) -> None:
        """Reads the archive's index and content.

        Raises:
            StoreError: the archive cannot be read, torch.save did not write it, or it holds code.
        """
        self._file = file
        self._start = start
        self._where = where
        if start < 0 or start + length > file.size:
            raise StoreError(f"{where}: truncated: {file.path} ends before it")
        with reading(where), file.path.open("rb", buffering=0) as raw:
            view = io.BufferedReader(_Slice(raw, start, length))
            self._records = _stored_records(view, where)
            self.content = _load(view, where)

    def rectangles(
        self, tensor: torch.Tensor, row: int = 0, column: int = 0
    ) -> Iterator[Rectangle]:
        """Yields the rectangles in the file of the 2-D ``tensor`` of ``content``.

        There is one rectangle, or one per column if the values of a row are not contiguous.

        Args:
            row, column: position of the tensor in its table.

        Raises:
            StoreError: the tensor's values extend beyond its record in the archive.
        """
        rows, columns = tensor.shape
        if not tensor.numel():
            return
        itemsize = tensor.element_size()
        row_stride, column_stride = (int(stride) * itemsize for stride in tensor.stride())
        begin = int(tensor.storage_offset()) * itemsize
        end = begin + (rows - 1) * row_stride + (columns - 1) * column_stride + itemsize
        offset = self._start + self._record(tensor, begin, end) + begin
        if column_stride == itemsize or columns == 1:
            yield Rectangle(self._file, offset, row_stride, row, rows, column, columns)
            return
        for i in range(columns):
            first = offset + i * column_stride
            yield Rectangle(self._file, first, row_stride, row, rows, column + i, 1)

    def _record(self, tensor: torch.Tensor, begin: int, end: int) -> int:
        """Returns the archive offset of the record that holds bytes [begin, end) of the tensor."""
        offset: Any = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        size = self._records.get(offset, -1)
        if min(begin, *tensor.stride()) < 0 or end > size:
            raise StoreError(
                f"{self._where}: a tensor's values are not in the file as torch.save stores them"
            )
        return int(offset)


def _stored_records(view: io.BufferedReader[Any], where: str) -> dict[int, int]:
    """Returns the size of every uncompressed record, by its byte offset."""
    if view.peek(9)[8:9] == b"{":  # after the length of a header
        raise StoreError(
            f"{where}: is safetensors: give a file that suffix; save a checkpoint of "
            "torch.distributed with SerializationFormat.TORCH_SAVE, the default"
        )
    if view.peek(4)[:4] != b"PK\x03\x04":
        raise StoreError(
            f"{where}: not a file of torch.save in its zip format: truncated, of another kind, "
            "or written before torch 1.6: load it there and save it anew"
        )
    try:
        with zipfile.ZipFile(view) as archive:
            infos = archive.infolist()
            if max((info.file_size for info in infos), default=0) > view.seek(0, io.SEEK_END):
                raise StoreError(f"{where}: a record is larger than the file: it is compressed")
            byteorder = [_start_of(archive, i) for i in infos if i.filename.endswith("/byteorder")]
        stored = [info for info in infos if info.compress_type == zipfile.ZIP_STORED]
        records = {_data_offset(view, info): info.file_size for info in stored}
    except (OSError, StoreError):
        raise
    except Exception as error:  # a damaged archive raises anything
        raise StoreError(f"{where}: truncated or damaged: {error}") from error
    if byteorder and byteorder[0] != sys.byteorder.encode():
        raise StoreError(f"{where}: written on a machine of another byte order")
    return records


def _start_of(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with archive.open(info) as record:
        return record.read(16)


def _data_offset(view: io.BufferedReader[Any], info: zipfile.ZipInfo) -> int:
    view.seek(info.header_offset)
    signature, name, extra = _LOCAL_HEADER.unpack(view.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no record where {info.filename} should be")
    return info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)


def _load(view: io.BufferedReader[Any], where: str) -> Any:
    import torch

    view.seek(0)
    try:
        return torch.load(view, map_location="meta", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise StoreError(f"{where}: {_refusal(str(error))}") from error


def _refusal(message: str) -> str:
    """Returns torch's load error as a line, without its advice to allow code."""
    forbidden = re.search(r"GLOBAL (\S+)", message)
    if part := re.search(r"[\w.]*(?:sharded_tensor[\w.]*|LocalShardsWrapper|DTensor)", message):
        return (
            f"refused: it holds {part[0]}, one rank's part of a sharded model; "
            "save with torch.distributed.checkpoint"
        )
    if forbidden:
        return (
            f"refused: it holds {forbidden[1]}, which only running code of the file could "
            "restore; save a plain state dict of tensors"
        )
    reason = " ".join(message.rpartition("WeightsUnpickler error:")[2].split())
    return f"not a state dict as torch.save writes it: {reason:.200}"


def open_torch_file(path: Path) -> tuple[LazyTensors, tuple[str, ...]]:
    """Returns the 2-D floating-point tensors of a file, and the keys of all other entries.

    The keys of nested dicts are joined by dots.

    Raises:
        StoreError: the file cannot be read, holds code or objects, or is not a dict.
    """
    file = SourceFile.of(path)
    archive = Archive(file, 0, file.size, str(path))
    if not isinstance(archive.content, Mapping):
        kind = type(archive.content).__name__
        raise StoreError(f"{path}: holds a {kind}, expected a state dict")
    tensors, others = split(archive.content, str(path))

    def find_rows(key: str) -> FileRows:
        tensor = tensors[key]
        rows, dim = tensor.shape
        return FileRows(
            archive.rectangles(tensor), (rows, dim), dtype_name(tensor), f"{path}: {key}"
        )

    return LazyTensors({key: partial(find_rows, key) for key in tensors}), others


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
