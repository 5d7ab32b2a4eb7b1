"""What a person asks of the planner, table by table: torchrec's ParameterConstraints, but for
what only training can honour.

Frozen values that plan.json stores, so that another number of devices is planned for under the
same constraints. Never imports torch.
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
from embedserve_store.user_file import read_user_file

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
"""Fields of ParameterConstraints that are refused when set, and why."""
QUANT = "quant"
COMPUTE_KERNELS = (QUANT, "quant_uvm", "quant_uvm_caching")
"""torchrec's kernels for inference: rows in the memory of their rank's device, in the host's, or
there with a cache on the device. On CPU ranks all of this is one memory."""


@dataclass(frozen=True)
class TableConstraints:
    """What may become of one table; None leaves it to the planner. Fields are torchrec's."""

    sharding_types: tuple[str, ...] | None = None
    """Of SHARDING_TYPES; None for what "auto" chooses among."""
    min_partition: int | None = None
    """The narrowest column_wise shard, in columns."""
    pooling_factors: tuple[float, ...] | None = None
    """For each feature of the table, ids in a bag on average; None for 1."""
    num_poolings: tuple[float, ...] | None = None
    """For each feature, bags an example; None for 1."""
    batch_sizes: tuple[int, ...] | None = None
    """For each feature, examples a batch; None for torchrec's 512."""
    is_weighted: bool = False
    compute_kernels: tuple[str, ...] | None = None
    """Of COMPUTE_KERNELS; None for all."""

    def to_json(self) -> dict[str, Any]:
        """Only what is set."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> TableConstraints:
        """Raises StoreError, led by ``where``: an unknown field, or a value of a wrong type."""
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
        """Raises StoreError, led by ``where``, unless ``table`` can be planned under this."""
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
        """Raises StoreError, led by ``where``, where the rows would have to stay off the GPU."""
        if self.compute_kernels and QUANT not in self.compute_kernels:
            raise StoreError(
                f"{where}: compute_kernels is {', '.join(self.compute_kernels)}, but on CUDA "
                f"tables lie in the memory of the GPU ({QUANT}); serve it on the CPU"
            )


def _is_list_of(*kinds: type) -> Callable[[Any], bool]:
    """Whether a value is a list of at least one of ``kinds``, its numbers above 0."""

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
    """Reads a YAML or JSON file: for each table, fields of ParameterConstraints.

    Raises:
        StoreError: the file cannot be read; names the table and field that is wrong.
    """
    data = _parsed(Path(path))
    if not isinstance(data, Mapping):
        raise StoreError(f"{path}: expected a mapping from table to constraints")
    return {
        str(name): TableConstraints.from_json(value, f"{path}: table {str(name)!r}")
        for name, value in data.items()
    }


def _parsed(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(read_user_file(path))  # JSON is YAML
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"{path}: cannot be parsed: {reason}") from error
