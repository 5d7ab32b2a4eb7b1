"""Tests of state dicts: they become one flat mapping, and any value but a plain tensor of rows is
only named."""

from typing import Any

import pytest
import torch

from embedserve_store.errors import StoreError
from embedserve_store.sources import state_dict
from embedserve_store.sources.state_dict import split

WEIGHT = torch.ones(3, 4)


class Sharded(torch.Tensor):
    """Stand-in for DTensor: a tensor with a part of the rows."""


def test_nested_dicts_are_flattened_with_dots() -> None:
    tensors, others = split({"a": {"b.c": WEIGHT, 1: {"d": WEIGHT}}, "e": 7, "f": {}}, "s")
    assert list(tensors) == ["a.b.c", "a.1.d"]
    assert tensors["a.b.c"] is WEIGHT
    assert others == ("e",)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3),
        torch.ones(3, 4, 5),
        torch.ones(3, 4, dtype=torch.int32),
        torch.ones(3, 4, dtype=torch.complex64),
        torch.ones(3, 4).to_sparse(),
        torch.ones(3, 4).as_subclass(Sharded),
        [WEIGHT],
        None,
    ],
)
def test_other_values_are_listed_by_name_only(value: Any) -> None:
    assert split({"x": value}, "s") == ({}, ("x",))


def test_duplicate_entries_are_rejected() -> None:
    with pytest.raises(StoreError, match=r"^s: has two entries 'a\.b'"):
        split({"a": {"b": WEIGHT}, "a.b": 3}, "s")


def test_recursive_dict_is_rejected() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(StoreError, match="nested more than 32 deep"):
        split(endless, "s")


@pytest.mark.parametrize("innermost", [{}, {"a": 1}])
def test_dict_in_very_many_places_is_rejected(
    monkeypatch: pytest.MonkeyPatch, innermost: dict[str, Any]
) -> None:
    monkeypatch.setattr(state_dict, "_REPEATED_BYTES_MAX", 100_000)
    for _ in range(16):
        innermost = {"x": innermost, "y": innermost}
    with pytest.raises(StoreError, match="s: holds the same dicts in too many places"):
        split(innermost, "s")


def test_large_dict_and_a_dict_in_some_places_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dict, "_REPEATED_BYTES_MAX", 100_000)
    shared = {"a": 1}
    _, others = split({"vocabulary": dict.fromkeys(range(10_000)), "x": shared, "y": shared}, "s")
    assert len(others) == 10_002
    assert others[-2:] == ("x.a", "y.a")
