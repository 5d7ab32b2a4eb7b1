"""Groups the tables of a model that share features. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from embedserve_store.format.table_spec import TableSpec


def table_groups(tables: Sequence[TableSpec]) -> tuple[tuple[TableSpec, ...], ...]:
    """Returns the tables in groups that share features, directly or through other tables.

    A table without shared features is a group of its own. Groups are in the order of their first
    tables.
    """
    parents = list(range(len(tables)))
    users: dict[str, int] = {}
    for index, table in enumerate(tables):
        for feature in table.feature_names:
            roots = [_root(parents, one) for one in (index, users.setdefault(feature, index))]
            parents[max(roots)] = min(roots)
    groups: dict[int, list[TableSpec]] = {}
    for index, table in enumerate(tables):
        groups.setdefault(_root(parents, index), []).append(table)
    return tuple(map(tuple, groups.values()))


def _root(parents: list[int], index: int) -> int:
    """Returns the root of ``index`` in the forest ``parents``, and shortens the path to it."""
    while parents[index] != index:
        parents[index] = parents[parents[index]]
        index = parents[index]
    return index
