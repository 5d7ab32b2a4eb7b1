"""Normalizes requests to the planner: sharding and constraints by table.

Accepts every format of them, and checks them against the tables and against each other. Imports
torchrec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.constants import MIN_CW_DIM

from embedserve_store.errors import (
    InvalidModelError,
    StoreError,
    check_tables_known,
    checking_model,
)
from embedserve_store.format.table_spec import COLUMN_MULTIPLE, TableSpec
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.sharding_types import AUTO, auto_types, why_not

Constraints = Mapping[str, TableConstraints | ParameterConstraints | Mapping[str, Any]]
"""Constraints by table: TableConstraints, ParameterConstraints, or its fields by name."""


def own_constraints(
    tables: Sequence[TableSpec], constraints: Constraints
) -> dict[str, TableConstraints]:
    """Converts ``constraints`` to TableConstraints, and checks them against their tables.

    Raises:
        InvalidModelError: a field is wrong, or serving cannot honour it. The message names the
            table and the field.
    """
    by_name = {table.name: table for table in tables}
    check_tables_known("constraints", constraints, by_name)
    result = {}
    for name, given in constraints.items():
        where = f"constraints of table {name!r}"
        with checking_model():
            if isinstance(given, ParameterConstraints):
                given = from_torchrec(given, by_name[name], where)
            elif not isinstance(given, TableConstraints):
                given = TableConstraints.from_json(given, where)
            given.check(by_name[name], where)
        result[name] = given
    return result


def from_torchrec(
    constraints: ParameterConstraints, table: TableSpec, where: str
) -> TableConstraints:
    """Converts torchrec's constraints of ``table`` to TableConstraints.

    Raises:
        StoreError: a field is wrong, or serving cannot honour it.
    """
    values = {one.name: getattr(constraints, one.name) for one in fields(constraints)}
    if getattr(values.get("output_dtype"), "value", None) == "FP32":
        del values["output_dtype"]
    if values.get("pooling_factors") == [1.0]:  # torchrec's default for any number of features
        del values["pooling_factors"]
    features = values.pop("feature_names", None) or table.feature_names
    if set(features) != set(table.feature_names):
        raise StoreError(
            f"{where}: feature_names is {features}, the table has {list(table.feature_names)}"
        )
    return TableConstraints.from_json(values, where)


def default_sharding(
    tables: Sequence[TableSpec],
    described: Mapping[str, str],
    constraints: Constraints,
    hosts: int | None,
) -> dict[str, str]:
    """Returns the default sharding of each table.

    This is the type of ``described`` (by table), or else "auto" among the types that its
    constraints allow, or else table_wise. It is "auto" instead of table_wise over several
    ``hosts``, because a table that must be table_wise is not divided over them.

    Raises:
        InvalidModelError: a constraint is wrong, as in own_constraints.
    """
    own = own_constraints(tables, constraints)
    allowed = {name: AUTO for name, one in own.items() if one.sharding_types}
    kind = AUTO if (hosts or 1) > 1 else "table_wise"
    default = dict.fromkeys((table.name for table in tables), kind)
    return default | allowed | dict(described)


def combined(
    tables: Sequence[TableSpec],
    sharding: str | Mapping[str, str],
    constraints: Mapping[str, TableConstraints],
) -> dict[str, TableConstraints]:
    """Adds the types of ``sharding`` to ``constraints``. Tables with neither are left out.

    Raises:
        InvalidModelError: the sharding of a table is unknown or contradicts its constraints. The
            message names the table.
    """
    names = [table.name for table in tables]
    if isinstance(sharding, str):
        sharding = dict.fromkeys(names, sharding)
    check_tables_known("sharding", sharding, names)
    result = dict(constraints)
    for table in tables:
        kind = sharding.get(table.name, AUTO)
        if kind == AUTO:
            continue
        if reason := why_not(kind, table):
            raise InvalidModelError(f"table {table.name!r}: {reason}")
        own = constraints.get(table.name, TableConstraints())
        if own.sharding_types and kind not in own.sharding_types:
            raise InvalidModelError(
                f"table {table.name!r}: sharding is {kind}, but its constraints allow "
                f"{', '.join(own.sharding_types)}"
            )
        result[table.name] = replace(own, sharding_types=(kind,))
    return result


def to_torchrec_constraints(
    own: TableConstraints, table: TableSpec, world_size: int, device_type: str
) -> ParameterConstraints:
    """Converts ``own`` for the planner, and sets the fields that it leaves open."""
    types = own.sharding_types or auto_types(table, device_type)
    if not own.sharding_types and world_size == 1:
        types = ("table_wise",)  # on a single rank the other types only add work
    if len(types) > 1:
        types = tuple(kind for kind in types if kind != "data_parallel")
    if len(types) > 1 and table.stored_dim < 2 * (own.min_partition or MIN_CW_DIM):
        types = tuple(kind for kind in types if kind != "column_wise")  # would have a single shard
    features = len(table.feature_names)
    narrowest = own.min_partition
    if narrowest is None and types == ("column_wise",):
        # These constraints mean that the table must be divided: every rank gets a shard if there
        # are enough columns. By default torchrec divides only tables with at least 256 columns.
        narrowest = max(COLUMN_MULTIPLE, -(-table.stored_dim // world_size))
    return ParameterConstraints(
        sharding_types=list(types),
        min_partition=narrowest,
        pooling_factors=list(own.pooling_factors or [1.0] * features),
        num_poolings=list(own.num_poolings or [1.0] * features),
        batch_sizes=list(own.batch_sizes) if own.batch_sizes else None,
        is_weighted=own.is_weighted,
    )
