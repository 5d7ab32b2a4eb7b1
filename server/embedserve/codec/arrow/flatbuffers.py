"""Reads and writes the subset of FlatBuffers that Arrow's messages need.

A table has values for some of its numbered fields, at positions that the message itself states. No
position is trusted: reading past the end raises an error of MALFORMED, and a reference to another
table is followed only when a caller reads it. (flatbuffers.dev, "FlatBuffer Internals")
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np

MALFORMED = (ValueError, struct.error)
"""Exceptions that reading raises where the bytes are not a valid FlatBuffer."""
UINT8, INT16, INT32, INT64 = Struct("<B"), Struct("<h"), Struct("<i"), Struct("<q")
_UINT16, _UINT32 = Struct("<H"), Struct("<I")
_PAIRS = np.dtype("<i8")
OFFSET_BYTES = _UINT32.size
ALIGNMENT = 8
"""Alignment of tables in bytes, the size of the largest number in a table."""


class FlatTable:
    """A table among the bytes of a message."""

    __slots__ = ("_at", "_data", "_fields", "_vtable")

    def __init__(self, data: bytes, at: int) -> None:
        vtable = at - INT32.unpack_from(data, at)[0]
        if vtable < 0:
            raise ValueError("a table is described before the first byte")
        self._data = data
        self._at = at
        self._vtable = vtable
        self._fields = (_UINT16.unpack_from(data, vtable)[0] - 4) // 2

    def number(self, field: int, layout: Struct) -> int:
        where = self._where(field)
        value: int = layout.unpack_from(self._data, where)[0] if where else 0
        return value

    def table(self, field: int) -> FlatTable | None:
        where = self._target(field)
        return FlatTable(self._data, where) if where else None

    def size(self, field: int) -> int:
        """Returns the bytes of a string, or the number of elements of a vector; 0 where the field
        is absent."""
        where = self._target(field)
        return int(_UINT32.unpack_from(self._data, where)[0]) if where else 0

    def text(self, field: int) -> str:
        """Returns a string; "" where the field is absent."""
        size, start = self._vector(field, 1)
        return self._data[start : start + size].decode()

    def tables(self, field: int) -> Iterator[FlatTable]:
        """Yields the tables of a vector in order."""
        count, start = self._vector(field, OFFSET_BYTES)
        for where in range(start, start + count * OFFSET_BYTES, OFFSET_BYTES):
            yield FlatTable(self._data, where + _UINT32.unpack_from(self._data, where)[0])

    def pairs(self, field: int) -> np.ndarray:
        """Returns a vector of structs of two int64, as int64 [n, 2]."""
        count, start = self._vector(field, 2 * _PAIRS.itemsize)
        return np.frombuffer(self._data, _PAIRS, 2 * count, start).reshape(count, 2)

    def _where(self, field: int) -> int:
        """Returns the position of a field's own bytes; 0 where the field is absent."""
        if field >= self._fields:
            return 0
        offset: int = _UINT16.unpack_from(self._data, self._vtable + 4 + 2 * field)[0]
        return self._at + offset if offset else 0

    def _target(self, field: int) -> int:
        """Returns the position that a field refers to; 0 where the field is absent."""
        where = self._where(field)
        return where + int(_UINT32.unpack_from(self._data, where)[0]) if where else 0

    def _vector(self, field: int, itemsize: int) -> tuple[int, int]:
        """Returns (number of elements, position of the first) of a vector."""
        where = self._target(field)
        if not where:
            return 0, 0
        count: int = _UINT32.unpack_from(self._data, where)[0]
        start = where + _UINT32.size
        if count * itemsize > len(self._data) - start:
            raise ValueError(f"{count} elements overrun the bytes that there are")
        return count, start


def root(data: bytes) -> FlatTable:
    """Returns the root table of a message."""
    return FlatTable(data, _UINT32.unpack_from(data, 0)[0])


@dataclass(frozen=True, slots=True)
class Number:
    """The value of a numeric field, with its format."""

    layout: Struct
    value: int


TableFields = Mapping[int, "Value"]
"""The values of a table's fields, by field number."""
Value = Number | str | np.ndarray | TableFields | Sequence[TableFields]
"""A field's value: a number, a string, structs of two int64 as an array [n, 2], a table, or a
vector of tables."""


def write(fields: TableFields) -> bytes:
    """Returns a message with a root table of ``fields``, padded to a multiple of 8 bytes."""
    out = bytearray(_UINT32.size)
    _UINT32.pack_into(out, 0, _put_table(out, fields))
    _pad(out, ALIGNMENT)
    return bytes(out)


def _put_table(out: bytearray, fields: TableFields) -> int:
    """Appends a table and everything that it refers to. Returns the table's position."""
    offsets = [0] * (max(fields, default=-1) + 1)
    size = INT32.size
    for field, value in sorted(fields.items()):
        nbytes = value.layout.size if isinstance(value, Number) else OFFSET_BYTES
        size += -size % nbytes
        offsets[field] = size
        size += nbytes
    _pad(out, ALIGNMENT)
    vtable = len(out)
    out += struct.pack(f"<{len(offsets) + 2}H", 4 + 2 * len(offsets), size, *offsets)
    _pad(out, ALIGNMENT)
    at = len(out)
    out += bytes(size)
    INT32.pack_into(out, at, at - vtable)
    for field, value in fields.items():
        where = at + offsets[field]
        if isinstance(value, Number):
            value.layout.pack_into(out, where, value.value)
        else:
            _UINT32.pack_into(out, where, _put(out, value) - where)
    return at


def _put(out: bytearray, value: str | np.ndarray | TableFields | Sequence[TableFields]) -> int:
    """Appends ``value`` and returns its position."""
    if isinstance(value, Mapping):
        return _put_table(out, value)
    _pad(out, OFFSET_BYTES)
    if isinstance(value, str):
        at, octets = len(out), value.encode()
        out += _UINT32.pack(len(octets)) + octets + b"\0"
        return at
    if isinstance(value, np.ndarray):
        out += bytes((-len(out) - _UINT32.size) % ALIGNMENT)
        at = len(out)
        out += _UINT32.pack(len(value)) + value.astype(_PAIRS, copy=False).tobytes()
        return at
    at = len(out)
    out += _UINT32.pack(len(value)) + bytes(OFFSET_BYTES * len(value))
    for number, fields in enumerate(value, start=1):
        where = at + OFFSET_BYTES * number
        _UINT32.pack_into(out, where, _put_table(out, fields) - where)
    return at


def _pad(out: bytearray, alignment: int) -> None:
    out += bytes(-len(out) % alignment)
