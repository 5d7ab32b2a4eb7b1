"""Defines planner constraints by table: torchrec's ParameterConstraints without training options.

Constraints are frozen values that plan.json stores. A host with another number of devices plans
under the same constraints. Never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from embedserve_store.errors import StoreError
from embedserve_store.format.table_spec import COLUMN_MULTIPLE, TableSpec
from embedserve_store.plans.sharding_types import SHARDING_TYPES, why_not

NOT_HONOURED = {
    "cache_params": "tables are not cached, they are in memory",
    "enforce_hbm": "tables are not cached, they are in memory",
    "stochastic_rounding": "it is of the optimizer",
    "bounds_check_mode": "every id is checked before the lookup",
    "output_dtype": "answers are float32",
    "device_group": "all tables of a model are on one kind of device",
    "key_value_params": "tables are not kept on SSD",
    "use_virtual_table": "tables are not kept on SSD",
}
"""Fields of ParameterConstraints that are rejected when set, with the reason."""
QUANT = "quant"
COMPUTE_KERNELS = (QUANT, "quant_uvm", "quant_uvm_caching")
"""torchrec's kernels for inference. Rows are in the memory of the rank's device, in host memory, or
in host memory with a cache on the device. On CPU ranks these are the same memory."""


@dataclass(frozen=True)
class TableConstraints:
    """Constraints of a table, with torchrec's fields; None leaves a choice to the planner."""

    sharding_types: tuple[str, ...] | None = None
    """Allowed types of SHARDING_TYPES; None for the types that "auto" chooses from."""
    min_partition: int | None = None
    """Minimum width of a column_wise shard, in columns."""
    pooling_factors: tuple[float, ...] | None = None
    """Average number of ids per bag, for each feature of the table; None for 1."""
    num_poolings: tuple[float, ...] | None = None
    """Bags per example, for each feature; None for 1."""
    batch_sizes: tuple[int, ...] | None = None
    """Examples per batch, for each feature; None for torchrec's 512."""
    is_weighted: bool = False
    compute_kernels: tuple[str, ...] | None = None
    """Allowed kernels of COMPUTE_KERNELS; None for all."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults, as JSON."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> TableConstraints:
        """Returns the constraints in ``data`` (parsed JSON or YAML).

        Raises:
            StoreError: a field is unknown, or a value is wrong.
        """
        if not isinstance(data, Mapping):
            raise StoreError(f"{where}: expected the fields of ParameterConstraints")
        values: dict[str, Any] = {}
        for name, value in data.items():
            if value is None or value is False:
                continue
            if name not in _FIELDS:
                raise StoreError(f"{where}: {_why_unknown(name)}")
            is_right, expected = _FIELDS[name]
            if not is_right(value):
                raise StoreError(f"{where}: {name} is {value!r}, expected {expected}")
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    def check(self, table: TableSpec, where: str) -> None:
        """Raises StoreError unless ``table`` can be planned under these constraints."""
        for kind in self.sharding_types or ():
            if reason := why_not(kind, table):
                raise StoreError(f"{where}: {reason}")
        features = len(table.feature_names)
        for name in ("pooling_factors", "num_poolings", "batch_sizes"):
            values = getattr(self, name)
            if values is not None and len(values) != features:
                raise StoreError(
                    f"{where}: {name} has {len(values)} values, the table {features} features"
                )

    def check_on_gpu(self, where: str) -> None:
        """Raises StoreError if the constraints would keep the rows out of GPU memory."""
        if self.compute_kernels and QUANT not in self.compute_kernels:
            raise StoreError(
                f"{where}: compute_kernels is {', '.join(self.compute_kernels)}, but on CUDA "
                f"tables lie in the memory of the GPU ({QUANT}); serve it on the CPU"
            )


def _is_list_of(*kinds: type) -> Callable[[Any], bool]:
    """Returns a predicate that accepts non-empty lists whose elements have a type of ``kinds``.

    Numbers must be above 0 and finite.
    """

    def is_right(values: Any) -> bool:
        return isinstance(values, list | tuple) and bool(values) and all(map(is_one, values))

    def is_one(value: Any) -> bool:
        return type(value) in kinds and (type(value) is str or 0 < value < float("inf"))

    return is_right


def _is_partition(value: Any) -> bool:
    return type(value) is int and value > 0 and value % COLUMN_MULTIPLE == 0


def _are_kernels(value: Any) -> bool:
    return _is_list_of(str)(value) and all(one in COMPUTE_KERNELS for one in value)


_PER_FEATURE = "above 0, one for each feature"
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "sharding_types": (_is_list_of(str), f"a list of {', '.join(SHARDING_TYPES)}"),
    "min_partition": (_is_partition, f"a multiple of {COLUMN_MULTIPLE} columns"),
    "pooling_factors": (_is_list_of(int, float), f"a list of numbers {_PER_FEATURE}"),
    "num_poolings": (_is_list_of(int, float), f"a list of numbers {_PER_FEATURE}"),
    "batch_sizes": (_is_list_of(int), f"a list of integers {_PER_FEATURE}"),
    "is_weighted": (lambda value: value is True, "true or false"),
    "compute_kernels": (
        _are_kernels,
        f"a list of {', '.join(COMPUTE_KERNELS)}, as others are for training",
    ),
}


def _why_unknown(name: object) -> str:
    if name in NOT_HONOURED:
        return f"{name} cannot be honoured when serving: {NOT_HONOURED[str(name)]}"
    return f"unknown field {name!r}, there are {', '.join(_FIELDS)}"


def read_constraints(path: str | os.PathLike[str]) -> dict[str, TableConstraints]:
    """Reads a YAML or JSON file that has fields of ParameterConstraints for each table.

    Raises:
        InvalidModelError: the file cannot be parsed, or has a key twice in one mapping.
        StoreError: the file cannot be read, or a constraint is wrong. The message names the table
            and field.
    """
    from embedserve_store.user_file import parse_user_file

    _, data = parse_user_file(Path(path))
    if not isinstance(data, Mapping):
        raise StoreError(f"{path}: expected a mapping from table to constraints")
    return {
        str(name): TableConstraints.from_json(value, f"{path}: table {str(name)!r}")
        for name, value in data.items()
    }
