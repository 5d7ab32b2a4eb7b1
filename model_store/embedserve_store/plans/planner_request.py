"""What is asked of the planner, by table: sharding and constraints in any form that they are
given in, checked against the tables and against each other. Imports torchrec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.constants import MIN_CW_DIM

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_spec import COLUMN_MULTIPLE, TableSpec
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.sharding_types import AUTO, auto_types, why_not

Constraints = Mapping[str, TableConstraints | ParameterConstraints | Mapping[str, Any]]
"""By table: ours, torchrec's, or its fields by name."""


def own_constraints(
    tables: Sequence[TableSpec], constraints: Constraints
) -> dict[str, TableConstraints]:
    """``constraints`` as values of our own, checked against their tables.

    Raises:
        InvalidModelError: names the table and the field that is wrong, or that cannot be honoured.
    """
    by_name = {table.name: table for table in tables}
    result = {}
    try:
        for name, given in constraints.items():
            where = f"constraints of table {name!r}"
            if name not in by_name:
                raise StoreError(f"{where}: the model has {list(by_name)}")
            if isinstance(given, ParameterConstraints):
                given = from_torchrec(given, by_name[name], where)
            elif not isinstance(given, TableConstraints):
                given = TableConstraints.from_json(given, where)
            given.check(by_name[name], where)
            result[name] = given
    except StoreError as error:
        raise InvalidModelError(str(error)) from error
    return result


def from_torchrec(
    constraints: ParameterConstraints, table: TableSpec, where: str
) -> TableConstraints:
    """The same constraints as a value of our own.

    Raises:
        StoreError: led by ``where``; a field is set that serving cannot honour.
    """
    values = {one.name: getattr(constraints, one.name) for one in fields(constraints)}
    if getattr(values.get("output_dtype"), "value", None) == "FP32":
        del values["output_dtype"]
    if values.get("pooling_factors") == [1.0]:  # torchrec's default, whatever the features
        del values["pooling_factors"]
    features = values.pop("feature_names", None) or table.feature_names
    if set(features) != set(table.feature_names):
        raise StoreError(
            f"{where}: feature_names is {features}, the table has {list(table.feature_names)}"
        )
    return TableConstraints.from_json(values, where)


def default_sharding(
    tables: Sequence[TableSpec], described: Mapping[str, str], constraints: Constraints
) -> dict[str, str]:
    """What each table is sharded by where it is not said otherwise: as ``described`` (by table),
    else what its constraints allow, else table_wise.

    Raises:
        InvalidModelError: as own_constraints.
    """
    own = own_constraints(tables, constraints)
    allowed = {name: AUTO for name, one in own.items() if one.sharding_types}
    default = dict.fromkeys((table.name for table in tables), "table_wise")
    return default | allowed | dict(described)


def combined(
    tables: Sequence[TableSpec],
    sharding: str | Mapping[str, str],
    constraints: Mapping[str, TableConstraints],
) -> dict[str, TableConstraints]:
    """``constraints`` with the types of ``sharding``; a table that has neither is left out.

    Raises:
        InvalidModelError: names the table whose sharding is unknown or against its constraints.
    """
    names = [table.name for table in tables]
    if isinstance(sharding, str):
        sharding = dict.fromkeys(names, sharding)
    for name in sharding:
        if name not in names:
            raise InvalidModelError(f"sharding names table {name!r}, the model has {names}")
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
    """``own`` for the planner, with everything set that it leaves open."""
    types = own.sharding_types or auto_types(table, device_type)
    if not own.sharding_types and world_size == 1:
        types = ("table_wise",)  # every other is the same, with more work
    if len(types) > 1:
        types = tuple(kind for kind in types if kind != "data_parallel")
    if len(types) > 1 and table.stored_dim < 2 * (own.min_partition or MIN_CW_DIM):
        types = tuple(kind for kind in types if kind != "column_wise")  # would be one shard
    features = len(table.feature_names)
    narrowest = own.min_partition
    if narrowest is None and types == ("column_wise",):
        narrowest = _narrowest(table.stored_dim, world_size)
    return ParameterConstraints(
        sharding_types=list(types),
        min_partition=narrowest,
        pooling_factors=list(own.pooling_factors or [1.0] * features),
        num_poolings=list(own.num_poolings or [1.0] * features),
        batch_sizes=list(own.batch_sizes) if own.batch_sizes else None,
        is_weighted=own.is_weighted,
    )


def _narrowest(columns: int, world_size: int) -> int:
    """Columns of a shard so that every rank gets one where there are enough: who asks for
    column_wise alone wants the table divided, which torchrec does from 256 columns up only."""
    return max(COLUMN_MULTIPLE, -(-columns // world_size))
