"""Tests of the memory that chunks of unsent responses keep."""

import numpy as np

from embedserve.lookup_types import ResponseChunks
from embedserve.wire.unsent_memory import UnsentMemory, owners_of


def test_slices_keep_their_batch_alive() -> None:
    batch = np.zeros((100, 8), np.float32)
    slices: list[memoryview] = [batch[:3].data, batch[50:51].data]
    assert owners_of(slices[:1]) == {id(batch): batch.nbytes}
    assert owners_of(one.cast("B") for one in slices) == {id(batch): batch.nbytes}


def test_bytes_own_their_memory() -> None:
    one, other = bytes(10), bytes(20)
    parts: ResponseChunks = [one, memoryview(other)[3:4]]
    assert owners_of(parts) == {id(one): 10, id(other): 20}
    assert owners_of(()) == {}


def test_unsent_memory_is_counted_without_keeping_it_alive() -> None:
    batch = np.zeros((100, 8), np.float32)
    parts: ResponseChunks = [bytes(10), batch[:3].data, batch[5:6].data, bytes(5)]
    unread = UnsentMemory(parts)
    assert unread.own_bytes == 15
    assert unread.batches() == {id(batch): batch.nbytes}
    del batch, parts
    assert unread.batches() == {}
