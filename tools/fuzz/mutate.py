"""Mutates bytes in the ways that parsers fail at."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

TOKENS = (
    *(b"\r\n", b"\n", b"\r\n\r\n", b"\0", b" ", b":", b",", b"[", b"]", b"{", b"}", b'"', b"\\u"),
    *(b"\xff" * 8, b"\x80" * 10, b"\x7f\xff\xff\xff", b"\x00\x00\x00\x00", b"NaN", b"1e999"),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: h\r\n", b"HTTP/2.0"),
    *(b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"PRI * HTTP/2.0"),
)
NUMBERS = (
    b"0",
    b"-1",
    b"9223372036854775808",
    b"18446744073709551616",
    b"4294967295",
    b"1e5",
    b"+3",
)
INSERTED_MAX = 64


def _flip(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _set(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + bytes([random.choice((0, 1, 9, 10, 13, 32, 127, 128, 255))]) + data[at + 1 :]


def _cut(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return data[: random.randrange(len(data))]


def _delete(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start = random.randrange(len(data))
    return data[:start] + data[start + random.randrange(1, 16) :]


def _repeat(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start = random.randrange(len(data))
    piece = data[start : start + random.randrange(1, 64)]
    return data[:start] + piece * random.choice((2, 3, 100)) + data[start:]


def _insert(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = random.randrange(len(data) + 1)
    piece = random.choice((random.choice(TOKENS), random.randbytes(random.randrange(INSERTED_MAX))))
    return data[:at] + piece + data[at:]


def _splice(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = random.choice(others)
    return data[: random.randrange(len(data))] + other[random.randrange(len(other)) :]


def _number(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    found = list(re.finditer(rb"\d+", data))
    if not found:
        return _flip(random, data, others)
    start, end = random.choice(found).span()
    return data[:start] + random.choice(NUMBERS) + data[end:]


Mutation = Callable[[Random, bytes, Sequence[bytes]], bytes]
MUTATIONS: Sequence[Mutation] = (_flip, _set, _cut, _delete, _repeat, _insert, _splice, _number)
AT_ONCE_MAX = 4


def mutated(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Returns ``data`` with several changes, which may insert parts of ``others``; never ``data``
    itself."""
    changed = data
    for _ in range(random.randrange(1, AT_ONCE_MAX + 1)):
        changed = random.choice(MUTATIONS)(random, changed or data, others)
    return changed if changed != data else data + b"\0"
