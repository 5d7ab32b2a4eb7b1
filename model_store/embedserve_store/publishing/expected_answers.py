"""Checks a source against the training model's own outputs, and makes goldens of them.

A description can be wrong in ways that no other check finds. Examples are a mean for a sum, two
tables of one width swapped, and keys in another order. Imports torch only through the source's
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.coverage import Coverage
from embedserve_store.format.manifest import KeyColumns, Manifest
from embedserve_store.goldens.expected import Expected
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.parity import blocks, check_finite, is_near
from embedserve_store.goldens.reference_pooling import pool
from embedserve_store.ids.id_map import IdMap
from embedserve_store.sources.expected_tables import POOLINGS, fitting, outputs_of
from embedserve_store.sources.rows import TableRows, source_rows

GOLDEN_EXAMPLES_MAX = 10_000
GOLDEN_IDS_MAX = 100_000
GOLDEN_BYTES_MAX = 16 << 20
"""Maximum examples of goldens, ids that they look up in all tables, and bytes of their lengths and
results. A server reads goldens whole at each load, and a router looks them up in one request for
each shard, so they stay well below the limits of files and requests."""


def coverage_of(
    expected: Expected, manifest: Manifest, source: Mapping[str, TableRows]
) -> Coverage:
    """Returns which tables, rows and poolings of ``manifest`` the outputs in ``expected`` verify.

    A feature without ids verifies nothing. A feature without a bag of two ids, or with rows of
    zeros, does not distinguish sum from mean.

    Args:
        expected: outputs of the training model, already accepted by expected_goldens.
        source: the source's rows, by table name.

    Raises:
        InvalidModelError: ``expected`` has the inputs of other features, or checksums of other
            tables.
    """
    _check_checksums(expected, manifest)
    bags = _in_order(expected, manifest)
    answers = _by_key(expected.answers, bags, manifest)
    rows: dict[str, NDArray[np.int64]] = {}
    unchecked: dict[int, str] = {}
    for feature, lengths in enumerate(bags.lengths):
        name = manifest.features[feature]
        if not lengths.any():
            unchecked[feature] = f"feature {name!r} has no id"
        elif manifest.is_pooled and lengths.max() < 2:
            unchecked[feature] = f"feature {name!r} has no bag of two ids, so that a sum is a mean"
        elif manifest.is_pooled and _is_sum_a_mean(feature, answers, bags, manifest, source):
            unchecked[feature] = (
                f"feature {name!r} has rows of which a sum is a mean, such as zeros"
            )
    pooling = {
        columns.key: columns.table.pooling
        for columns in manifest.columns
        if manifest.is_pooled and columns.feature not in unchecked
    }
    clauses = [*unchecked.values()]
    if manifest.is_weighted and not _have_weights_effect(answers, bags, manifest, source):
        clauses.append("the answers are the same without weights")
    for columns in manifest.columns:
        found = bags.ids[bags.span(columns.feature)]
        before = rows.get(columns.table.name, found[:0])
        rows[columns.table.name] = np.union1d(before, found)
    counts = {name: len(expected.checksums.get(name, one)) for name, one in rows.items()}
    return Coverage(int(bags.lengths.shape[1]), counts, pooling, tuple(clauses))


def _check_checksums(expected: Expected, manifest: Manifest) -> None:
    described = {table.name: table.num_embeddings for table in manifest.tables}
    for name, checksums in expected.checksums.items():
        if name not in described:
            raise InvalidModelError(
                f"expected: has checksums of table {name!r}, the description has "
                f"{', '.join(described)}"
            )
        if len(checksums) != described[name]:
            raise InvalidModelError(
                f"expected: has checksums of {len(checksums):,} rows of table {name!r}, the "
                f"description has {described[name]:,}"
            )


def _is_sum_a_mean(
    feature: int,
    answers: Mapping[str, NDArray[np.float32]],
    bags: Bags,
    manifest: Manifest,
    source: Mapping[str, TableRows],
) -> bool:
    """Returns whether each table of ``feature`` gives the same outputs with the other pooling."""
    own = bags.of(feature)
    return all(
        len([*fitting(answers[one.key], own, [one.table], source)]) == len(POOLINGS)
        for one in manifest.columns
        if one.feature == feature
    )


def _have_weights_effect(
    answers: Mapping[str, NDArray[np.float32]],
    bags: Bags,
    manifest: Manifest,
    source: Mapping[str, TableRows],
) -> bool:
    """Returns whether any output would change if the weights were left out."""
    plain = replace(bags, weights=None)
    return not all(
        is_near(answers[one.key], _outputs(plain, one, source), source[one.table.name].dtype)
        for one in manifest.columns
    )


def expected_goldens(
    expected: Expected,
    manifest: Manifest,
    rows: Mapping[str, TableRows],
    id_maps: Mapping[str, IdMap],
) -> tuple[Bags, NDArray[np.float32]]:
    """Returns ``expected`` as goldens: bags with callers' ids, and the model's float32 outputs.

    All examples are compared, and the first ones within the limits of goldens are returned. Bags
    with a row that no caller's id maps to are emptied. Outputs are recomputed in float32 from
    the source's rows if any table is not float32.

    Args:
        expected: outputs of the training model for bags of row numbers.
        rows: the source's rows, by table name.
        id_maps: id maps, by table name, for tables with the rule "map".

    Raises:
        InvalidModelError: as check_expected, or no id is left.
    """
    bags = check_expected(expected, manifest, rows)
    goldens, kept = _with_callers_ids(bags, manifest, id_maps)
    answers = expected.answers
    if any(one.dtype != "float32" for one in rows.values()):
        answers = pool(manifest, bags, bags.ids, partial(source_rows, rows))
    return _first_examples(goldens, _answers_of(answers, bags, manifest, kept), manifest)


def check_expected(expected: Expected, manifest: Manifest, rows: Mapping[str, TableRows]) -> Bags:
    """Compares ``expected`` with the outputs of ``rows``, and returns its bags in the manifest's
    order.

    Raises:
        InvalidModelError: the rows give other outputs, or the description has other keys.
    """
    bags = _in_order(expected, manifest)
    _check_keys(expected, manifest)
    _check_answers(expected, bags, manifest, rows)
    return bags


def _in_order(expected: Expected, manifest: Manifest) -> Bags:
    """Returns the bags of ``expected`` with their features in the manifest's order."""
    if set(expected.features) != set(manifest.features):
        raise InvalidModelError(
            f"expected: its features are {', '.join(expected.features)}, those of the description "
            f"{', '.join(manifest.features)}"
        )
    bags = expected.bags
    if (bags.weights is not None) != manifest.is_weighted:
        has = "has weights" if bags.weights is not None else "has no weights"
        takes = "takes some" if manifest.is_weighted else "takes none"
        raise InvalidModelError(f"expected: {has}, the description {takes} (is_weighted)")
    position = {feature: i for i, feature in enumerate(expected.features)}
    order = [position[feature] for feature in manifest.features]
    places = np.arange(len(bags.ids))
    at = np.concatenate([places[bags.span(i)] for i in order])
    return bags.take(at, np.ascontiguousarray(bags.lengths[order]))


def _check_keys(expected: Expected, manifest: Manifest) -> None:
    if expected.keys != manifest.keys:
        raise InvalidModelError(
            f"expected: its keys are {', '.join(expected.keys)}, those of the description "
            f"{', '.join(manifest.keys)}"
            + (": the same in another order" * (set(expected.keys) == set(manifest.keys)))
        )
    for key, dim, described in zip(
        manifest.keys, expected.length_per_key, manifest.length_per_key, strict=True
    ):
        if dim != described:
            raise InvalidModelError(
                f"expected: key {key!r} has {dim} values, the description {described}"
            )


def _check_answers(
    expected: Expected, bags: Bags, manifest: Manifest, rows: Mapping[str, TableRows]
) -> None:
    for i, (feature, count) in enumerate(
        zip(manifest.features, manifest.rows_per_feature, strict=True)
    ):
        numbers = bags.ids[bags.span(i)]
        wrong = numbers[(numbers < 0) | (numbers >= count)]
        if wrong.size:
            raise InvalidModelError(
                f"expected: feature {feature!r} asks for row {wrong[0]}, its table has {count} rows"
            )
    shape = manifest.answers_shape(bags.lengths)
    if expected.answers.shape != shape:
        raise InvalidModelError(
            f"expected: answers is {list(expected.answers.shape)}, its bags and the description "
            f"mean {list(shape)}"
        )
    check_finite(expected.answers, manifest, bags, "expected")
    given = _by_key(expected.answers, bags, manifest)
    for columns in manifest.columns:
        found, table = given[columns.key], columns.table
        answers = _outputs(bags, columns, rows)
        if not is_near(found, answers, rows[table.name].dtype):
            off = float(np.abs(found - answers).max())
            fits = fitting(found, bags.of(columns.feature), manifest.tables, rows)
            hints = (f"; they are those of table {name!r}, pooling {one}" for name, one in fits)
            raise InvalidModelError(
                f"expected: key {columns.key!r} of table {table.name!r}, pooling {table.pooling}: "
                f"the training model's answers are others, off by {off:.3g} where the largest is "
                f"{np.abs(found).max():.3g}{next(hints, '')}"
            )


def _by_key(
    answers: NDArray[np.float32], bags: Bags, manifest: Manifest
) -> dict[str, NDArray[np.float32]]:
    """Returns the part of ``answers`` of each key, in the manifest's order."""
    return {key: answers[place] for key, place in blocks(manifest, bags)}


def _outputs(bags: Bags, columns: KeyColumns, rows: Mapping[str, TableRows]) -> NDArray[np.float32]:
    """Returns the outputs of one key, computed from ``rows``."""
    table = columns.table
    return outputs_of(rows[table.name], bags.of(columns.feature), (table.pooling,))[0]


def _with_callers_ids(
    bags: Bags, manifest: Manifest, id_maps: Mapping[str, IdMap]
) -> tuple[Bags, NDArray[np.bool_]]:
    """Returns the bags with callers' ids in place of row numbers, and a bool mask [F, B].

    A bag is emptied if one of its rows has no id; the mask is False for it.
    """
    ids = np.empty_like(bags.ids)
    has_id = np.ones(len(ids), bool)
    for feature, rule in enumerate(manifest.rule_per_feature):
        span = bags.span(feature)
        numbers = bags.ids[span]
        if rule.rule == "rows":
            ids[span] = numbers
        elif rule.rule == "modulo":
            ids[span] = numbers - rule.offset
            has_id[span] = (ids[span] >= 0) & (ids[span] < rule.modulus)
        else:
            name = manifest.features[feature]
            table = next(one.name for one in manifest.tables if name in one.feature_names)
            ids[span], has_id[span] = _ids_of(id_maps[table], numbers)
    bag_of = np.repeat(np.arange(bags.lengths.size), bags.lengths.ravel())
    kept = np.ones(bags.lengths.size, bool)
    kept[bag_of[~has_id]] = False
    is_kept = kept[bag_of]
    if ids.size and not is_kept.any():
        raise InvalidModelError("expected: each of its bags has a row that no id of a caller means")
    by_feature = kept.reshape(bags.lengths.shape)
    lengths = np.where(by_feature, bags.lengths, 0).astype(np.int32)
    return replace(bags, ids=ids).take(is_kept, lengths), by_feature


def _ids_of(
    id_map: IdMap, numbers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns an id for each row in ``numbers`` [n], and a mask of the rows that have an id."""
    at = np.flatnonzero(np.isin(id_map.rows, numbers.astype(np.uint32)))
    rows, ids = id_map.rows[at].astype(np.int64), id_map.ids[at]
    order = np.argsort(rows, kind="stable")
    rows, ids = rows[order], ids[order]
    if not len(rows):
        return np.zeros_like(numbers), np.zeros(len(numbers), bool)
    found = np.minimum(np.searchsorted(rows, numbers), len(rows) - 1)
    return ids[found], rows[found] == numbers


def _answers_of(
    answers: NDArray[np.float32], bags: Bags, manifest: Manifest, kept: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Returns ``answers`` adapted to the bags that are left, by the mask ``kept`` [F, B].

    Pooled outputs of emptied bags, which are not in ``kept``, become zeros. Without pooling, the
    rows of these bags are dropped.
    """
    if manifest.is_pooled:
        result = answers.copy()
        for one in manifest.columns:
            result[~kept[one.feature], one.start : one.end] = 0
        return result
    own = _by_key(answers, bags, manifest)
    return np.concatenate(
        [
            own[one.key][np.repeat(kept[one.feature], bags.lengths[one.feature])]
            for one in manifest.columns
        ]
    )


def _first_examples(
    bags: Bags, answers: NDArray[np.float32], manifest: Manifest
) -> tuple[Bags, NDArray[np.float32]]:
    """Returns the first examples within the limits of goldens, and their outputs.

    Raises:
        InvalidModelError: these examples have no id, and others have.
    """
    examples = bags.lengths.shape[1]
    ids = np.sum([bags.lengths[one.feature] for one in manifest.columns], axis=0, dtype=np.int64)
    values = sum(manifest.length_per_key) if manifest.is_pooled else ids * answers.shape[1]
    nbytes = np.broadcast_to(4 * (len(manifest.features) + values), examples)
    fits = (ids.cumsum() <= GOLDEN_IDS_MAX) & (nbytes.cumsum() <= GOLDEN_BYTES_MAX)
    count = min(int(fits.sum()), GOLDEN_EXAMPLES_MAX)
    if count == examples:
        return bags, answers
    is_first = np.repeat(np.tile(np.arange(examples) < count, len(bags.lengths)), bags.lengths.flat)
    first = bags.take(is_first, bags.lengths[:, :count])
    if bags.ids.size and not first.ids.size:
        raise InvalidModelError(
            f"expected: its first {count} examples have no ids that callers have, and goldens are "
            f"the first examples: {GOLDEN_EXAMPLES_MAX:,} at most, with {GOLDEN_IDS_MAX:,} ids and "
            f"{GOLDEN_BYTES_MAX:,} bytes: begin with others"
        )
    if manifest.is_pooled:
        return first, answers[:count]
    own = _by_key(answers, bags, manifest)
    counts = first.lengths.sum(axis=1)
    kept = [own[one.key][: counts[one.feature]] for one in manifest.columns]
    return first, np.concatenate(kept)
