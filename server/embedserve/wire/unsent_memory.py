"""Memory pinned by unsent responses.

A response is a view of its batch's output array and keeps the whole array alive. The array is
therefore counted as a whole, and once for all its responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref


def owners_of(chunks: Iterable[bytes | memoryview]) -> dict[int, int]:
    """Returns the bytes of the objects that ``chunks`` keep alive, by their id().

    A slice keeps the values of its whole batch.
    """
    return {id(owner): _size(owner) for owner in _owners(chunks)}


def _owners(chunks: Iterable[bytes | memoryview]) -> Iterator[Any]:
    for chunk in chunks:
        owner: Any = chunk.obj if isinstance(chunk, memoryview) else chunk
        while (base := getattr(owner, "base", None)) is not None and hasattr(base, "nbytes"):
            owner = base
        yield owner


def _size(owner: Any) -> int:
    size: int = len(owner) if isinstance(owner, bytes) else owner.nbytes
    return size


class UnsentMemory:
    """Memory that a response keeps after its chunks were passed to a transport.

    Holds weak references only.

    Attributes:
        own_bytes: bytes of chunks that are not slices of a batch.
    """

    __slots__ = ("_batches", "own_bytes")

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        owners = list(_owners(chunks))
        self.own_bytes = sum(len(one) for one in owners if isinstance(one, bytes))
        self._batches = [ref(one) for one in owners if not isinstance(one, bytes)]

    def batches(self) -> dict[int, int]:
        """Returns the bytes of batches that are still alive, by their id(), like owners_of."""
        alive = [one() for one in self._batches]
        return {id(one): one.nbytes for one in alive if one is not None}
