"""Finds the tables, poolings and order that a training model's outputs determine.

Compares each key's outputs with the outputs of every table of a checkpoint. Never guesses: if
several tables or poolings fit, the choice stays open. Imports torch only through the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.table_spec import TableSpec, answer_keys
from embedserve_store.goldens.expected import Expected
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.parity import TRAINED_TOLERANCES, is_near
from embedserve_store.goldens.reference_pooling import pool_rows
from embedserve_store.sources.rows import TableRows

POOLINGS = ("sum", "mean")


@dataclass(frozen=True)
class ShownTables:
    """Tables as determined by outputs, and which of their fields are not guessed."""

    tables: tuple[TableSpec, ...]
    """Tables in the order of the outputs as far as it is determined. Features and pooling are
    either determined or as guessed."""
    with_features: frozenset[str]
    """Names of the tables whose features are determined."""
    with_pooling: frozenset[str]
    """Names of the tables whose pooling is determined."""
    is_ordered: bool
    """Whether the outputs determine the order, and that there is no other table."""
    absent: tuple[str, ...]
    """Tables of the checkpoint that no key looks up."""


@dataclass(frozen=True)
class _Key:
    """A key of the outputs, with the tables and poolings that give its outputs."""

    feature: str
    fits: tuple[tuple[str, str], ...]
    """Pairs of table and pooling; empty if the feature has no ids."""

    @property
    def table(self) -> str | None:
        """The only table that gives the key's outputs; None if there are none or several."""
        names = {table for table, _ in self.fits}
        return names.pop() if len(names) == 1 else None


def shown_tables(
    guessed: Sequence[TableSpec], rows: Mapping[str, TableRows], expected: Expected
) -> ShownTables:
    """Returns the ``guessed`` tables with all fields and the order that ``expected`` determines.

    Args:
        guessed: the tables of a checkpoint, in any order; all pooled, or none.
        rows: the checkpoint's rows, by table name.

    Raises:
        InvalidModelError: no table gives the outputs of a key.
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
    """Returns each key of ``expected`` with the tables and poolings that give its outputs."""
    bags = expected.bags
    totals = bags.lengths.sum(axis=1)
    is_pooled = guessed[0].pooling != "none"
    features = [_feature_of(key, expected.features) for key in expected.keys]
    positions = [expected.features.index(feature) for feature in features]
    widths = expected.length_per_key if is_pooled else [int(totals[one]) for one in positions]
    _check_answers(expected, sum(widths), is_pooled)
    blocks = [
        expected.answers[:, end - width : end] if is_pooled else expected.answers[end - width : end]
        for width, end in zip(widths, accumulate(widths), strict=True)
    ]
    own_bags = [bags.of(at) for at in positions]
    candidates = _candidates(guessed, blocks, own_bags, rows)
    keys = []
    for key, feature, block, own, tables in zip(
        expected.keys, features, blocks, own_bags, candidates, strict=True
    ):
        named = key.removeprefix(f"{feature}@") if key != feature else None
        possible = [table for table in tables if named in (None, table.name)]
        fits = tuple(fitting(block, own, possible, rows))
        if own.ids.size and not fits:
            raise InvalidModelError(
                f"expected: key {key!r}: no table of the checkpoint gives the training model's "
                "answers"
            )
        keys.append(_Key(feature, fits))
    return keys


def _candidates(
    tables: Sequence[TableSpec],
    blocks: Sequence[NDArray[np.float32]],
    bags: Sequence[Bags],
    rows: Mapping[str, TableRows],
) -> list[list[TableSpec]]:
    """Returns for each key the tables that give the outputs of its shortest bag.

    Each table is read once for all keys: keys times tables are too many to read every bag.

    Args:
        blocks, bags: outputs and bags of each key.
    """
    keys_by_dim: dict[int, list[int]] = {}
    for key, (block, own) in enumerate(zip(blocks, bags, strict=True)):
        if own.ids.size:
            keys_by_dim.setdefault(block.shape[1], []).append(key)
    is_pooled = tables[0].pooling != "none"
    shortest = {
        dim: _ShortestBags([(blocks[key], bags[key]) for key in keys], is_pooled)
        for dim, keys in keys_by_dim.items()
    }
    found: list[list[TableSpec]] = [[] for _ in blocks]
    for table in tables:
        dim = table.embedding_dim
        for i in shortest[dim].given_by(rows[table.name]) if dim in shortest else ():
            found[keys_by_dim[dim][i]].append(table)
    return found


class _ShortestBags:
    """The shortest bag with ids of each of K keys, and its outputs [K, dim]."""

    def __init__(self, keys: Sequence[tuple[NDArray[np.float32], Bags]], is_pooled: bool) -> None:
        """
        Args:
            keys: outputs and bags of each key.
        """
        ids, weights, outputs = [], [], []
        for block, bags in keys:
            at, span = _shortest(bags.lengths[0]) if is_pooled else (0, slice(0, 1))
            ids.append(bags.ids[span])
            weights.append(np.ones_like(ids[-1]) if bags.weights is None else bags.weights[span])
            outputs.append(block[at])
        self._ids = np.concatenate(ids)
        self._weights = np.concatenate(weights).astype(np.float32)
        self._lengths = np.array([[one.size] for one in ids])
        self._starts = np.cumsum(self._lengths) - self._lengths[:, 0]
        self._outputs = np.stack(outputs)
        self._largest = np.array([np.abs(block).max() for block, _ in keys])

    def given_by(self, rows: TableRows) -> list[int]:
        """Returns the keys whose outputs ``rows`` give, with twice the tolerance of is_near."""
        are_there = (self._ids >= 0) & (self._ids < rows.shape[0])
        values = rows.gather(np.where(are_there, self._ids, 0)).float().numpy()
        sums = np.add.reduceat(values * self._weights[:, None], self._starts)
        off = [np.abs(self._outputs - one).max(axis=1) for one in (sums, sums / self._lengths)]
        bound = 2 * TRAINED_TOLERANCES[rows.dtype] * self._largest + np.finfo(np.float32).tiny
        is_near = np.minimum(*off) <= bound
        return np.flatnonzero(is_near & np.logical_and.reduceat(are_there, self._starts)).tolist()


def _shortest(lengths: NDArray[np.int32]) -> tuple[int, slice]:
    """Returns the index of the shortest bag with ids, and where its ids are."""
    at = int(np.where(lengths, lengths, np.iinfo(np.int32).max).argmin())
    start = int(lengths[:at].sum())
    return at, slice(start, start + int(lengths[at]))


def _feature_of(key: str, features: tuple[str, ...]) -> str:
    """Returns the feature of a key. A key is the feature's name or FEATURE@TABLE."""
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


def fitting(
    block: NDArray[np.float32],
    bags: Bags,
    tables: Iterable[TableSpec],
    rows: Mapping[str, TableRows],
) -> Iterator[tuple[str, str]]:
    """Yields the pairs of table and pooling whose output for ``bags`` is ``block``.

    Only tables that have all ids of the bags can fit.

    Args:
        block: outputs [B, dim]; without pooling [n, dim].
        bags: bags of one feature.
        tables: candidate tables; all pooled, or none.
        rows: the training model's rows, by table name.
    """
    for table in tables:
        are_there = not ((bags.ids < 0) | (bags.ids >= table.num_embeddings)).any()
        if table.embedding_dim != block.shape[1] or not are_there:
            continue
        poolings = POOLINGS if table.pooling != "none" else ("none",)
        outputs = outputs_of(rows[table.name], bags, poolings)
        for pooling, answers in zip(poolings, outputs, strict=True):
            if is_near(block, answers, rows[table.name].dtype):
                yield table.name, pooling


def outputs_of(rows: TableRows, bags: Bags, poolings: Sequence[str]) -> list[NDArray[np.float32]]:
    """Returns the outputs of a table for the bags of one feature, as each of ``poolings`` gives
    them: [B, dim], or without pooling [n, dim]."""
    values: NDArray[np.float32] = rows.gather(bags.ids).float().numpy()
    if bags.weights is not None:
        values = values * bags.weights[:, None]
    return [
        values if one == "none" else pool_rows(values, bags.lengths[0], one) for one in poolings
    ]
