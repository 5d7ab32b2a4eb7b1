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


def split(
    state_dict: Mapping[Any, Any], where: str
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Returns the plain 2-D floating-point tensors by key, and the keys of all other entries.

    The keys of nested dicts are joined by dots.

    Args:
        where: start of error messages.

    Raises:
        StoreError: two entries have the same key, or dicts are nested too deeply.
    """
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, None] = {}
    for key, value in _flattened(state_dict, "", _DEPTH_MAX, where):
        if key in tensors or key in others:
            raise StoreError(f"{where}: has two entries {key!r}")
        if is_table_like(value):
            tensors[key] = value
        else:
            others[key] = None
    return tensors, tuple(others)


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
    if not depth:
        raise StoreError(f"{where}: dicts are nested more than {_DEPTH_MAX} deep")
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{name}.", depth - 1, where)
        else:
            yield name, value
