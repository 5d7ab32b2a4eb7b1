"""Finds the tables, poolings and order that a training model's answers show, for a description.

Compares each key's answers with what every table of a checkpoint would give. Never guesses: what
several tables or poolings would give alike stays open. Imports torch only through the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.table_spec import TableSpec, answer_keys
from embedserve_store.goldens.expected import Expected
from embedserve_store.goldens.hand_pooling import pool_rows
from embedserve_store.goldens.parity import is_near
from embedserve_store.sources.rows import TableRows


@dataclass(frozen=True)
class ShownTables:
    """Tables as answers show them, and which of their fields are shown rather than guessed."""

    tables: tuple[TableSpec, ...]
    """In the order of the answers as far as it is shown; features and pooling as they are shown, or
    as they were guessed."""
    with_features: frozenset[str]
    """Tables, by name, whose features are shown."""
    with_pooling: frozenset[str]
    """Tables, by name, whose pooling is shown."""
    is_ordered: bool
    """Whether the order, and that there is no other table, is shown."""
    absent: tuple[str, ...]
    """Tables of the checkpoint that no key looks up."""


@dataclass(frozen=True)
class _Key:
    """One key of the answers, with the tables and poolings that give them."""

    feature: str
    fits: tuple[tuple[str, str], ...]
    """Pairs of table and pooling; empty where the feature has no ids."""

    @property
    def table(self) -> str | None:
        """The only table that gives the answers, if there is one."""
        names = {table for table, _ in self.fits}
        return names.pop() if len(names) == 1 else None


def shown_tables(
    guessed: Sequence[TableSpec], rows: Mapping[str, TableRows], expected: Expected
) -> ShownTables:
    """Returns the ``guessed`` tables with the features, poolings and order that ``expected`` shows.

    Args:
        guessed: the tables of a checkpoint, in any order; all pooled, or none.
        rows: by table, as the checkpoint has them.

    Raises:
        InvalidModelError: no table gives the answers of a key.
        StoreError: the rows cannot be read.
    """
    keys = _keys(guessed, rows, expected)
    by_name = {table.name: table for table in guessed}
    found: dict[str, list[_Key]] = {}
    for key in keys:
        if key.table is not None:
            found.setdefault(key.table, []).append(key)
    is_whole = all(key.table is not None for key in keys)
    with_pooling = {}
    for name, ones in found.items():
        poolings = set.intersection(*({pooling for _, pooling in one.fits} for one in ones))
        if len(poolings) == 1:
            with_pooling[name] = poolings.pop()
    tables = [
        replace(
            by_name[name],
            feature_names=tuple(one.feature for one in ones),
            pooling=with_pooling.get(name, by_name[name].pooling),
        )
        for name, ones in found.items()
    ]
    rest = [table for table in guessed if table.name not in found]
    return ShownTables(
        tuple(tables if is_whole else tables + rest),
        frozenset(found) if is_whole else frozenset(),
        frozenset(with_pooling),
        is_whole and answer_keys(tuple(tables)) == expected.keys,
        tuple(table.name for table in rest) if is_whole else (),
    )


def _keys(
    guessed: Sequence[TableSpec], rows: Mapping[str, TableRows], expected: Expected
) -> list[_Key]:
    """Each key of ``expected`` with what gives its answers."""
    bags = expected.bags
    totals = bags.lengths.sum(axis=1)
    ends = np.cumsum(totals)
    is_pooled = guessed[0].pooling != "none"
    features = [_feature_of(key, expected.features) for key in expected.keys]
    positions = [expected.features.index(feature) for feature in features]
    widths = expected.length_per_key if is_pooled else [int(totals[one]) for one in positions]
    _check_answers(expected, sum(widths), is_pooled)
    keys = []
    for key, feature, at, width, end in zip(
        expected.keys, features, positions, widths, accumulate(widths), strict=True
    ):
        span = slice(int(ends[at] - totals[at]), int(ends[at]))
        block = (
            expected.answers[:, end - width : end]
            if is_pooled
            else expected.answers[end - width : end]
        )
        weights = None if bags.weights is None else bags.weights[span]
        asked = _Asked(bags.ids[span], bags.lengths[at], weights)
        named = key.removeprefix(f"{feature}@") if key != feature else None
        keys.append(_Key(feature, _fits(key, block, asked, named, guessed, rows)))
    return keys


def _feature_of(key: str, features: tuple[str, ...]) -> str:
    """Returns the feature of a key, which is its name or FEATURE@TABLE."""
    feature = key if key in features else key.rpartition("@")[0]
    if feature not in features:
        raise InvalidModelError(
            f"expected: key {key!r} is of no feature, features are {', '.join(features)}"
        )
    return feature


def _check_answers(expected: Expected, width: int, is_pooled: bool) -> None:
    shape = expected.answers.shape
    wanted = (expected.examples, width) if is_pooled else (width, expected.length_per_key[0])
    if shape != wanted:
        raise InvalidModelError(
            f"expected: answers is {list(shape)}, its bags and keys mean {list(wanted)}"
        )


@dataclass(frozen=True)
class _Asked:
    """The bags of one feature."""

    ids: NDArray[np.int64]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32] | None


def _fits(
    key: str,
    block: NDArray[np.float32],
    asked: _Asked,
    named: str | None,
    guessed: Sequence[TableSpec],
    rows: Mapping[str, TableRows],
) -> tuple[tuple[str, str], ...]:
    """The pairs of table and pooling that answer ``asked`` with ``block``."""
    if not len(asked.ids):
        return ()
    fits = []
    for table in guessed:
        is_possible = (
            table.embedding_dim == block.shape[1]
            and asked.ids.min() >= 0
            and asked.ids.max() < table.num_embeddings
            and named in (None, table.name)
        )
        if not is_possible:
            continue
        values: NDArray[np.float32] = rows[table.name].gather(asked.ids).float().numpy()
        if asked.weights is not None:
            values = values * asked.weights[:, None]
        for pooling in ("sum", "mean") if table.pooling != "none" else ("none",):
            answers = values if pooling == "none" else pool_rows(values, asked.lengths, pooling)
            if is_near(block, answers, rows[table.name].dtype):
                fits.append((table.name, pooling))
    if not fits:
        raise InvalidModelError(
            f"expected: key {key!r}: no table of the checkpoint gives the training model's answers"
        )
    return tuple(fits)
