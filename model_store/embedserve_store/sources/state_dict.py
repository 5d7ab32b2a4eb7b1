"""A state dict in memory as one flat mapping: its tables apart from all else.

The same for what torch.load gave, where tensors have no values yet, and for a live model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from embedserve_store.errors import StoreError

if TYPE_CHECKING:
    import torch

_DEPTH_MAX = 32
"""Levels of nested dicts; a checkpoint that contains itself has no end."""


def split(
    state_dict: Mapping[Any, Any], where: str
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The plain 2-D floating-point tensors, and the names of all else.

    Nested dicts give keys joined by dots.

    Raises:
        StoreError: led by ``where``; two entries have one key, or nesting has no end.
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
    """Whether it is a plain 2-D floating-point tensor: no subclass, not sharded, not sparse."""
    import torch

    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.dim() == 2
        and value.is_floating_point()
        and not value.is_neg()  # whose bytes are not its values but their negatives
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
