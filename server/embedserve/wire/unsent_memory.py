"""What answers that are not read keep in memory: not their rest, but all that they are part of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref


def owners_of(parts: Iterable[bytes | memoryview]) -> dict[int, int]:
    """Bytes of what ``parts`` keep, by its identity: a slice keeps the values of its batch."""
    return {id(owner): _size(owner) for owner in _owners(parts)}


def _owners(parts: Iterable[bytes | memoryview]) -> Iterator[Any]:
    for part in parts:
        owner: Any = part.obj if isinstance(part, memoryview) else part
        while (base := getattr(owner, "base", None)) is not None and hasattr(base, "nbytes"):
            owner = base
        yield owner


def _size(owner: Any) -> int:
    size: int = len(owner) if isinstance(owner, bytes) else owner.nbytes
    return size


class UnsentMemory:
    """What an answer keeps whose parts were handed to a transport. Keeps nothing itself.

    Attributes:
        own_bytes: of parts that are no slices.
    """

    __slots__ = ("_batches", "own_bytes")

    def __init__(self, parts: Iterable[bytes | memoryview]) -> None:
        owners = list(_owners(parts))
        self.own_bytes = sum(len(one) for one in owners if isinstance(one, bytes))
        self._batches = [ref(one) for one in owners if not isinstance(one, bytes)]

    def batches(self) -> dict[int, int]:
        """As owners_of, of the batches that are still there."""
        alive = [one() for one in self._batches]
        return {id(one): one.nbytes for one in alive if one is not None}
