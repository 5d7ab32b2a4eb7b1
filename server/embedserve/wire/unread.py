"""What answers that are not read keep in memory: not their rest, but all that they are part of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from embedserve.types import Parts


def owners_of(parts: Parts | Iterable[memoryview]) -> dict[int, int]:
    """Bytes of what ``parts`` keep, by its identity: a slice keeps the values of its batch."""
    owners: dict[int, int] = {}
    for part in parts:
        owner: Any = part.obj if isinstance(part, memoryview) else part
        while (base := getattr(owner, "base", None)) is not None and hasattr(base, "nbytes"):
            owner = base
        owners[id(owner)] = len(owner) if isinstance(owner, bytes) else owner.nbytes
    return owners
