"""Tests that messages are split into the same fields as by the protobuf library."""

import random

import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError

from embedserve.codec.protobuf_fields import GROUP_DEPTH_MAX, fields, varint

MESSAGES = 100_000
SEED = 34
FIELDS_MAX = 5
MUTATIONS_MAX = 3


def is_accepted(body: bytes) -> bool:
    try:
        for _ in fields(body):
            pass
    except ValueError:
        return False
    return True


def is_accepted_by_protobuf(body: bytes) -> bool:
    """Whether the bytes are a valid message. A message type without fields treats all fields as
    unknown."""
    try:
        Empty.FromString(body)
    except DecodeError:
        return False
    return True


def message(draw: random.Random, depth: int = 0) -> bytes:
    parts = []
    for _ in range(draw.randrange(FIELDS_MAX)):
        number = draw.choice([1, 2, 15, 16, 2047, 2**29 - 1])
        kind = draw.choice([0, 1, 2, 3, 5])
        tag = varint(number << 3 | kind)
        if kind == 0:
            parts.append(tag + varint(draw.getrandbits(draw.choice([7, 14, 35, 64]))))
        elif kind == 2:
            data = draw.randbytes(draw.randrange(5)) if depth else message(draw, 1)
            parts.append(tag + varint(len(data)) + data)
        elif kind == 3:
            inner = message(draw, depth + 1) if depth < 3 else b""
            parts.append(tag + inner + varint(number << 3 | 4))
        else:
            parts.append(tag + draw.randbytes(8 if kind == 1 else 4))
    return b"".join(parts)


def mutated(draw: random.Random, body: bytes) -> bytes:
    found = bytearray(body)
    for _ in range(draw.randrange(MUTATIONS_MAX)):
        at = draw.randrange(len(found) + 1)
        match draw.randrange(4):
            case 0:
                found[at:at] = draw.randbytes(draw.randrange(1, 12))
            case 1:
                del found[at : at + draw.randrange(1, 4)]
            case 2:
                found[at : at + 1] = bytes([draw.getrandbits(8)])
            case _:
                found[at:at] = b"\x80" * draw.randrange(1, 12)
    return bytes(found)


def test_mutated_messages_are_accepted_iff_protobuf_accepts_them() -> None:
    draw = random.Random(SEED)
    accepted = 0
    for _ in range(MESSAGES):
        body = mutated(draw, message(draw))
        expected = is_accepted_by_protobuf(body)
        accepted += expected
        assert is_accepted(body) == expected, body
    assert 0.2 < accepted / MESSAGES < 0.8


@pytest.mark.parametrize(
    "depth", [1, GROUP_DEPTH_MAX - 1, GROUP_DEPTH_MAX, GROUP_DEPTH_MAX + 1, 10**5]
)
def test_group_depth_limit_equals_that_of_protobuf(depth: int) -> None:
    body = b"\x0b" * depth + b"\x0c" * depth
    assert is_accepted(body) == is_accepted_by_protobuf(body)


@pytest.mark.parametrize(
    "body",
    [
        b"\x00\x00",
        b"\x0c",
        b"\x0b\x14",
        b"\x0b",
        b"\x0e",
        b"\x80" * 9 + b"\x01\x00",
        b"\x88\x80\x80\x80\x80\x00\x00",
        b"\xf8\xff\xff\xff\x1f\x00",
        b"\x08" + b"\xff" * 10,
        b"\x08" + b"\xff" * 9 + b"\x7f",
        b"\x0a" + b"\xff" * 9 + b"\x01",
    ],
)
def test_malformed_messages_are_handled_like_by_protobuf(body: bytes) -> None:
    assert is_accepted(body) == is_accepted_by_protobuf(body)
