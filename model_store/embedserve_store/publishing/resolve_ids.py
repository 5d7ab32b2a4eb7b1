"""Resolves how each table's ids become rows: checks the id rules and builds the id maps.

Passes to publish.py the tables with their rules, and the id maps to store. Never imports torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError, check_tables_known, checking_model
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.id_map import IdMap
from embedserve_store.ids.string_hashes import hash_strings
from embedserve_store.ids.vocabulary import first_strings, read_vocabulary

Vocabulary = str | os.PathLike[str] | NDArray[Any] | Sequence[Any] | Mapping[Any, int]
"""A vocabulary file, the ids in the order of their rows, or a mapping from id to row."""

Vocabularies = Mapping[str, Vocabulary]
"""Vocabularies by table name."""

EXAMPLES = 4
"""Number of a vocabulary's strings that the manifest stores as examples."""


def resolve_ids(
    tables: tuple[TableSpec, ...], rules: Mapping[str, IdRule], vocabularies: Vocabularies
) -> tuple[tuple[TableSpec, ...], dict[str, IdMap]]:
    """Returns ``tables`` with their id rules, and id maps by name for tables with the rule "map".

    Raises:
        InvalidModelError: a rule or vocabulary names an unknown table or does not fit its table, or
            tables of one feature map ids to rows differently.
        StoreError: a vocabulary cannot be read.
    """
    names = [table.name for table in tables]
    for what, given in (("ids", rules), ("vocabularies", vocabularies)):
        check_tables_known(what, given, names)
    tables = tuple(
        replace(table, ids=_rule(table, rules.get(table.name), table.name in vocabularies))
        for table in tables
    )
    read = {
        table.name: _id_map(table, vocabularies[table.name])
        for table in tables
        if table.ids.rule == "map"
    }
    resolved = tuple(
        replace(table, ids=read[table.name][0]) if table.name in read else table for table in tables
    )
    maps = {name: id_map for name, (_, id_map) in read.items()}
    _check_shared(resolved, maps)
    return resolved, maps


def _rule(table: TableSpec, given: IdRule | None, has_vocabulary: bool) -> IdRule:
    rule = given or table.ids
    if has_vocabulary and rule == IdRule():
        rule = IdRule(rule="map")
    if rule.rule == "modulo" and not rule.modulus:
        # The default modulus is the rows after the offset, but at least 1. An offset that leaves no
        # row is rejected by rule.check below.
        rest = min(max(1, table.num_embeddings - rule.offset), table.num_embeddings)
        rule = replace(rule, modulus=rest)
    if has_vocabulary != (rule.rule == "map"):
        problem = "has a vocabulary" if has_vocabulary else "needs a vocabulary"
        raise InvalidModelError(f"table {table.name!r}: ids.rule is {rule.rule!r}: it {problem}")
    with checking_model():
        rule.check(table.num_embeddings, f"table {table.name!r}: ids")
    return rule


def _id_map(table: TableSpec, vocabulary: Vocabulary) -> tuple[IdRule, IdMap]:
    """Returns the table's rule, with the number and examples of ids, and the id map."""
    if isinstance(vocabulary, (str, os.PathLike)):
        path = Path(vocabulary)
        ids, rows = read_vocabulary(path, table.ids.id_type, table.num_embeddings, table.name)
        if not len(ids):
            raise InvalidModelError(f"table {table.name!r}: {path}: holds no ids")
        strings = first_strings(path, EXAMPLES) if table.ids.id_type == "string" else ()
    else:
        given, rows = _entries(vocabulary, table)
        ids = _as_int64(given, table)
        strings = tuple(given[:EXAMPLES]) if table.ids.id_type == "string" else ()
    rule = replace(table.ids, entries=len(ids), examples=strings)
    return rule, IdMap.build(ids, rows, table.name)


def _entries(
    vocabulary: NDArray[Any] | Sequence[Any] | Mapping[Any, int], table: TableSpec
) -> tuple[NDArray[Any] | Sequence[Any], NDArray[np.int64]]:
    """Returns the ids of an in-memory vocabulary, and the row of each id."""
    if isinstance(vocabulary, Mapping):
        given: NDArray[Any] | Sequence[Any] = list(vocabulary)
        for row in vocabulary.values():
            if not isinstance(row, (int, np.integer)) or isinstance(row, bool):
                raise InvalidModelError(
                    f"table {table.name!r}: its vocabulary says row {row!r}, expected an integer"
                )
        rows = np.array(
            [min(max(int(row), -1), table.num_embeddings) for row in vocabulary.values()]
        )
    else:
        given, rows = vocabulary, np.arange(len(vocabulary))
    if not len(given):
        raise InvalidModelError(f"table {table.name!r}: its vocabulary holds no ids")
    outside = (rows < 0) | (rows >= table.num_embeddings)
    if outside.any():
        raise InvalidModelError(
            f"table {table.name!r}: its vocabulary says row {rows[outside.argmax()]}, "
            f"the table has {table.num_embeddings} rows"
        )
    return given, rows


def _as_int64(given: NDArray[Any] | Sequence[Any], table: TableSpec) -> NDArray[np.int64]:
    """Returns the ids as int64 lookup keys; strings become their hashes."""
    where = f"table {table.name!r}: its vocabulary holds"
    if table.ids.id_type == "string":
        for one in given:
            if not isinstance(one, str):
                raise InvalidModelError(f"{where} {one!r}, which is not a string")
        for one, count in Counter(given).most_common(1):
            if count > 1:
                raise InvalidModelError(f"{where} {one!r} {count} times")
        return hash_strings(list(given), f"table {table.name!r}: its vocabulary")
    ids = np.asarray(given)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise InvalidModelError(f"{where} {ids.dtype}, expected int64 (or ids.id_type string)")
    if ids.dtype == np.uint64 and ids.max() > np.iinfo(np.int64).max:
        raise InvalidModelError(f"{where} {ids.max()}, which is outside int64")
    return ids.astype(np.int64)


def _check_shared(tables: tuple[TableSpec, ...], maps: Mapping[str, IdMap]) -> None:
    """Raises InvalidModelError if tables of one feature have different id maps.

    A request has one list of ids per feature, which all tables of the feature share.
    """
    owner: dict[str, TableSpec] = {}
    for table in tables:
        for feature in table.feature_names:
            first = owner.setdefault(feature, table)
            if first.name in maps and table.name in maps and maps[first.name] != maps[table.name]:
                raise InvalidModelError(
                    f"feature {feature!r} serves tables {first.name!r} and {table.name!r}, "
                    "whose vocabularies differ"
                )
