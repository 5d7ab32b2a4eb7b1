"""Parses a protobuf message at the byte level: positions of its fields, and packed numbers as
arrays.

Numbers never become Python objects. Other fields are counted before Python objects are created for
them. The encoding is described at protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from google.protobuf.message import Message

VARINT, I64, LENGTH_DELIMITED, START_GROUP, END_GROUP, I32 = range(6)
"""Wire types."""
GROUP_DEPTH_MAX = 100
"""Depth of nested groups, the limit of the protobuf library."""
UINT64_MAX = 2**64 - 1
"""Largest value of a varint. Higher bits are dropped."""
TAG_MAX, TAG_BYTES_MAX = 2**32 - 1, 5
"""Largest tag, 29 bits of number and 3 of wire type, and the bytes of its varint."""
IN_GROUP, FIRST_TAG = 0, 8
"""Tag that ``fields`` yields within groups, and the smallest valid tag. Below FIRST_TAG the field
number is 0, which no field has."""
VARINT_BYTES_MAX, _VARINT_BITS_MAX = 10, 70
"""Bytes of the longest varint, which has 64 bits, and their bits."""
_CUT_SHORT = "it ends within a field"


def tag_of(field: int, wire_type: int) -> int:
    return field << 3 | wire_type


def field_tag(message: type[Message], field: str, wire_type: int = LENGTH_DELIMITED) -> int:
    """Returns the tag of the field with the name ``field`` in the definition of ``message``."""
    return tag_of(message.DESCRIPTOR.fields_by_name[field].number, wire_type)


def read_varint(body: bytes | memoryview, position: int) -> tuple[int, int]:
    """Returns (value, end position) of the varint at ``position``.

    Raises:
        IndexError: the varint continues past the end of ``body``.
        ValueError: the varint has over VARINT_BYTES_MAX bytes.
    """
    first = body[position]
    if first < 0x80:
        return first, position + 1
    second = body[position + 1]
    if second < 0x80:
        return first & 0x7F | second << 7, position + 2
    value = first & 0x7F | (second & 0x7F) << 7
    for shift in range(14, _VARINT_BITS_MAX, 7):
        byte = body[position + shift // 7]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & UINT64_MAX, position + shift // 7 + 1
    raise ValueError(f"a number has over {VARINT_BYTES_MAX} bytes")


def varint(value: int) -> bytes:
    """Returns ``value`` in base 128, low bits first (protobuf encoding, "Base 128 Varints")."""
    if value <= 0x7F:
        return bytes((value,))
    if value <= 0x3FFF:
        return bytes((value & 0x7F | 0x80, value >> 7))
    return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80)) + varint(value >> 14)


def fields(body: bytes | memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yields (tag, start of the field, start of its value, end of its value) for each field.

    The tag is IN_GROUP for the start of a group, which no known client sends, and for each field in
    it. A caller that bounds the number of fields therefore bounds the fields of groups, too.

    Raises:
        ValueError: ``body`` ends within a field, a field has an invalid number or wire type, or a
            group ends with another number.
    """
    try:
        position, size = 0, len(body)
        groups: list[int] = []  # field numbers of the groups that have not ended
        while position < size:
            tag, start = body[position], position + 1
            if tag >= 0x80:
                tag, start = _read_tag(body, position)
            if tag < FIRST_TAG:
                raise ValueError("a field has the number 0")
            wire_type = tag & 7
            if wire_type == LENGTH_DELIMITED:
                length, start = body[start], start + 1
                if length >= 0x80:
                    length, start = read_varint(body, start - 1)
                end = start + length
            elif wire_type == VARINT:
                _, end = read_varint(body, start)
            elif wire_type in (I32, I64):
                end = start + (4 if wire_type == I32 else 8)
            elif wire_type == START_GROUP:
                end = start
                groups.append(tag >> 3)
                if len(groups) > GROUP_DEPTH_MAX:
                    raise ValueError(f"over {GROUP_DEPTH_MAX} groups stand within one another")
            elif wire_type == END_GROUP and groups:
                end = start
                if groups.pop() != tag >> 3:
                    raise ValueError("a group ends as another")
            else:
                raise ValueError(f"a field has the wire type {wire_type}")
            if end > size:
                raise ValueError(_CUT_SHORT)
            yield IN_GROUP if groups else tag, position, start, end
            position = end
        if groups:
            raise ValueError(_CUT_SHORT)
    except IndexError as error:
        raise ValueError(_CUT_SHORT) from error


def _read_tag(body: bytes | memoryview, position: int) -> tuple[int, int]:
    tag, end = read_varint(body, position)
    if tag > TAG_MAX or end - position > TAG_BYTES_MAX:
        raise ValueError("the number of a field has over 29 bits")
    return tag, end


class TooManyFieldsError(Exception):
    """Raised for a message with more fields than allowed."""


def extract_fields(
    body: bytes | memoryview, names: Mapping[int, str], fields_max: int
) -> tuple[dict[str, list[memoryview]], list[memoryview], int]:
    """Splits a message into the values of some fields and the rest, both as views of ``body``.

    Returns (the values of the fields whose tags are in ``names``, by name and in order; the chunks
    of the message without them; the number of its fields).

    Raises:
        TooManyFieldsError: there are more than ``fields_max`` fields, extracted or not.
        ValueError: the message is malformed, as in ``fields``.
    """
    taken: dict[str, list[memoryview]] = {}
    view = memoryview(body)
    rest: list[memoryview] = []
    rest_start = count = 0
    for count, (tag, position, start, end) in enumerate(fields(body), 1):
        if count > fields_max:
            raise TooManyFieldsError
        name = names.get(tag)
        if name is not None:
            taken.setdefault(name, []).append(view[start:end])
            if position > rest_start:
                rest.append(view[rest_start:position])
            rest_start = end
    rest.append(view[rest_start:])
    return taken, rest, count


def count_varints(packed: bytes | memoryview) -> int:
    return int(np.count_nonzero(np.frombuffer(packed, np.uint8) < 0x80))


def read_varints(packed: bytes) -> np.ndarray:
    """Returns the varints in ``packed`` as int64 [n]. Bits above the 64th are dropped.

    Raises:
        ValueError: ``packed`` ends within a varint, or a varint is too long.
    """
    octets = np.frombuffer(packed, np.uint8)
    lasts = np.flatnonzero(octets < 0x80)
    if not octets.size:
        return np.zeros(0, np.int64)
    if not lasts.size or lasts[-1] != octets.size - 1:
        raise ValueError("packed numbers end within one")
    if lasts.size == octets.size:
        return octets.astype(np.int64)
    firsts = np.empty_like(lasts)
    firsts[0] = 0
    np.add(lasts[:-1], 1, out=firsts[1:])
    values = (octets[firsts] & 0x7F).astype(np.uint64)
    longer = np.flatnonzero(lasts > firsts)
    for shift in range(7, _VARINT_BITS_MAX, 7):
        at = firsts[longer] + shift // 7
        values[longer] |= (octets[at] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(shift)
        longer = longer[lasts[longer] > at]
        if not longer.size:
            return values.view(np.int64)
    raise ValueError(f"a number has over {VARINT_BYTES_MAX} bytes")
