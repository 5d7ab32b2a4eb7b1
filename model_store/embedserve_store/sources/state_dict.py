"""Flattens an in-memory state dict, and separates its tables from all other entries.

Handles the result of torch.load, whose tensors have no values yet, and the state dict of a live
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import StoreError

if TYPE_CHECKING:
    import torch

_DEPTH_MAX = 32
"""Maximum levels of nested dicts. The limit stops at a checkpoint that contains itself."""
_REPEATED_BYTES_MAX = 100_000_000
"""Maximum bytes of the entries of dicts that are in several places. A tiny file may hold a dict in
billions of places. Entries of a dict in one place are as many as in the file, and not limited."""
_ENTRY_BYTES = 100
"""Bytes that an entry counts besides its name."""


def split(
    state_dict: Mapping[Any, Any], where: str
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Returns the plain 2-D floating-point tensors by key, and the keys of all other entries.

    The keys of nested dicts are joined by dots.

    Raises:
        StoreError: two entries have the same key, or dicts are nested too deeply or in too many
            places.
    """
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, None] = {}
    seen: set[int] = set()
    repeated_bytes = 0
    for key, value in _flattened(state_dict, "", _DEPTH_MAX, where):
        if isinstance(value, Mapping):
            if id(value) in seen:
                repeated_bytes += _names_bytes(key, value)
            if repeated_bytes > _REPEATED_BYTES_MAX:
                raise StoreError(f"{where}: holds the same dicts in too many places")
            seen.add(id(value))
            continue
        if key in tensors or key in others:
            raise StoreError(f"{where}: has two entries {key!r}")
        if is_table_like(value):
            tensors[key] = value
        else:
            others[key] = None
    return tensors, tuple(others)


def _names_bytes(prefix: str, data: Mapping[Any, Any]) -> int:
    return _ENTRY_BYTES + sum(_ENTRY_BYTES + len(f"{prefix}.{key}") for key in data)


def is_table_like(value: Any) -> bool:
    """Returns whether ``value`` is a plain 2-D floating-point tensor.

    Tensor subclasses, sharded tensors and sparse tensors are not plain.
    """
    import torch

    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.dim() == 2
        and value.is_floating_point()
        and not value.is_neg()  # the bytes hold the negated values
    )


def _flattened(
    data: Mapping[Any, Any], prefix: str, depth: int, where: str
) -> Iterator[tuple[str, Any]]:
    """Yields every entry with its full name; a nested dict before its own entries."""
    if not depth:
        raise StoreError(f"{where}: dicts are nested more than {_DEPTH_MAX} deep")
    for key, value in data.items():
        name = f"{prefix}{key}"
        yield name, value
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{name}.", depth - 1, where)
