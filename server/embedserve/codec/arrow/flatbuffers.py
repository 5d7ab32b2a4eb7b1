"""Flatbuffers, as much of them as Arrow's messages are made of: tables read, and written.

A table has values for some of its numbered fields. Those that are read lie where positions among
the bytes say, none of which is trusted: what lies past the end is one of MALFORMED, and nothing is
followed further than its caller asks. (flatbuffers.dev, "FlatBuffer Internals")
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np

MALFORMED = (ValueError, struct.error)
"""What reading raises where the bytes are none."""
UINT8, INT16, INT32, INT64 = Struct("<B"), Struct("<h"), Struct("<i"), Struct("<q")
_UINT16, _UINT32 = Struct("<H"), Struct("<I")
_PAIRS = np.dtype("<i8")
OFFSET_BYTES = _UINT32.size
ALIGNMENT = 8
"""Of the largest number in a table."""


class FlatTable:
    """One table among the bytes of a message."""

    __slots__ = ("_at", "_data", "_fields", "_vtable")

    def __init__(self, data: bytes, at: int) -> None:
        vtable = at - INT32.unpack_from(data, at)[0]
        if vtable < 0:
            raise ValueError("a table is described before the first byte")
        self._data = data
        self._at = at
        self._vtable = vtable
        self._fields = (_UINT16.unpack_from(data, vtable)[0] - 4) // 2

    def number(self, field: int, form: Struct, default: int = 0) -> int:
        where = self._where(field)
        value: int = form.unpack_from(self._data, where)[0] if where else default
        return value

    def table(self, field: int) -> FlatTable | None:
        where = self._target(field)
        return FlatTable(self._data, where) if where else None

    def size(self, field: int) -> int:
        """Bytes of a string, or how many tables there are of a field that has several."""
        where = self._target(field)
        return int(_UINT32.unpack_from(self._data, where)[0]) if where else 0

    def text(self, field: int) -> str:
        """A string; "" where there is none."""
        size, start = self._vector(field, 1)
        return self._data[start : start + size].decode()

    def tables(self, field: int) -> Iterator[FlatTable]:
        """Of a field that has several, one after the other."""
        count, start = self._vector(field, OFFSET_BYTES)
        for where in range(start, start + count * OFFSET_BYTES, OFFSET_BYTES):
            yield FlatTable(self._data, where + _UINT32.unpack_from(self._data, where)[0])

    def pairs(self, field: int) -> np.ndarray:
        """int64 [n, 2], of a field that has structs of two of them."""
        count, start = self._vector(field, 2 * _PAIRS.itemsize)
        return np.frombuffer(self._data, _PAIRS, 2 * count, start).reshape(count, 2)

    def _where(self, field: int) -> int:
        """Where a field's own bytes lie; 0 where it has none."""
        if field >= self._fields:
            return 0
        offset: int = _UINT16.unpack_from(self._data, self._vtable + 4 + 2 * field)[0]
        return self._at + offset if offset else 0

    def _target(self, field: int) -> int:
        """Where what a field refers to lies; 0 where it refers to nothing."""
        where = self._where(field)
        return where + int(_UINT32.unpack_from(self._data, where)[0]) if where else 0

    def _vector(self, field: int, itemsize: int) -> tuple[int, int]:
        """(how many elements, where they begin) of a field that has several."""
        where = self._target(field)
        if not where:
            return 0, 0
        count: int = _UINT32.unpack_from(self._data, where)[0]
        start = where + _UINT32.size
        if count * itemsize > len(self._data) - start:
            raise ValueError(f"{count} elements overrun the bytes that there are")
        return count, start


def root(data: bytes) -> FlatTable:
    """The table that a message is."""
    return FlatTable(data, _UINT32.unpack_from(data, 0)[0])


@dataclass(frozen=True, slots=True)
class Number:
    """The value of a field that is no other table."""

    form: Struct
    value: int


Fields = Mapping[int, "Value"]
"""A table's, by their numbers."""
Value = Number | str | np.ndarray | Fields | Sequence[Fields]
"""A number, a string, structs of two int64 [n, 2], a table, or several."""


def write(fields: Fields) -> bytes:
    """A message that is a table of ``fields``, to a multiple of 8 bytes."""
    out = bytearray(_UINT32.size)
    _UINT32.pack_into(out, 0, _put_table(out, fields))
    _pad(out, ALIGNMENT)
    return bytes(out)


def _put_table(out: bytearray, fields: Fields) -> int:
    """Where it was put; what it refers to comes behind it."""
    offsets = [0] * (max(fields, default=-1) + 1)
    size = INT32.size
    for field, value in sorted(fields.items()):
        nbytes = value.form.size if isinstance(value, Number) else OFFSET_BYTES
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
            value.form.pack_into(out, where, value.value)
        else:
            _UINT32.pack_into(out, where, _put(out, value) - where)
    return at


def _put(out: bytearray, value: str | np.ndarray | Fields | Sequence[Fields]) -> int:
    """Where it was put."""
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
