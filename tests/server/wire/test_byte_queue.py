"""Tests of the byte queue: order is kept for any chunks, without an object for each byte."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from embedserve.wire.byte_queue import SMALL_BYTES, ByteQueue

BYTES_PER_SMALL_CHUNK_MAX = 2.0
SIZES = st.one_of(st.integers(0, 8), st.integers(SMALL_BYTES - 2, SMALL_BYTES + 2))


@given(
    st.lists(st.tuples(SIZES, st.lists(st.tuples(SIZES, st.integers(0, 6)), max_size=4))),
)
def test_taken_bytes_equal_appended_bytes(rounds: list[tuple[int, list[tuple[int, int]]]]) -> None:
    queue, expected, number = ByteQueue(), b"", 0
    for size, takes in rounds:
        chunk = bytes((number + i) % 251 for i in range(size))
        number += size
        queue.append(chunk)
        expected += chunk
        for wanted, skipped in takes:
            nbytes = min(wanted, len(expected))
            if nbytes:
                assert queue.front(nbytes) == expected[:nbytes]
            assert queue.take(nbytes, skipped) == expected[:nbytes][skipped:]
            expected = expected[nbytes:]
            assert queue.nbytes == len(expected)
    assert queue.take_all() == expected
    assert queue.nbytes == 0


def test_omitted_bytes_may_be_more_than_the_first_chunk() -> None:
    queue = ByteQueue()
    queue.append(b"abc")
    queue.append(bytes(SMALL_BYTES))
    assert queue.take(SMALL_BYTES + 3, 5) == bytes(SMALL_BYTES - 2)


def test_body_of_single_bytes_has_little_memory_overhead() -> None:
    queue, count = ByteQueue(), 100_000
    for _ in range(count):
        queue.append(b"x")
    held = sum(map(sys.getsizeof, queue._chunks)) + sys.getsizeof(queue._chunks)
    assert held < BYTES_PER_SMALL_CHUNK_MAX * count
    assert queue.take_all() == b"x" * count
