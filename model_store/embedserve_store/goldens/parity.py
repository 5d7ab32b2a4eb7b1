"""Parity gate: checks that results are the trained vectors, as closely as their dtype allows.

Compares the results for a version's goldens with two references. Against the stored rows only the
order of additions may differ, and on GPUs FBGEMM's rounding of int8 and int4 values. Against the
source model the rounding to the stored dtype is allowed, too. The publisher runs the check before a
version appears, and a server before it is ready. The goldens of a delta (delta_parity.py) are
compared with the training model's results alone. Never imports torch.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import CODES_MAX, TableSpec
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.goldens.goldens_file import Bags, Goldens
from embedserve_store.goldens.reference_pooling import RowsOf, pool, stored_rows

SUMS_TOLERANCE = 1e-5
"""Tolerance for float32 sums in another order, relative to the largest magnitude of a key's golden
results."""

TRAINED_TOLERANCES = {"float32": SUMS_TOLERANCE, "float16": 2.0**-8, "bfloat16": 2.0**-5}
"""Tolerance by the dtype of the training model's rows, relative to the largest magnitude of the
outputs of a key. A training model may add half-precision values in half precision."""

_HALF = 2.0**-11
"""Largest relative error of rounding to a normal float16."""
_HALF_MIN = 2.0**-25
"""Largest absolute error of rounding to a float16 below its normal range."""
_MARGIN = 1.5


_ROUNDING = {
    "float32": (0.0, 0.0),
    "float16": (_HALF, _HALF_MIN),
    **{
        dtype: (2 * (0.5 / codes + _HALF) + _HALF, (codes + 1) * _HALF_MIN)
        for dtype, codes in CODES_MAX.items()
    },
}
"""Bounds of the error of a stored value by dtype: the first times the largest magnitude of its row,
plus the second. A quantized row spans at most twice its largest magnitude in as many steps as there
are codes. Rounding to a code costs at most half a step. The step and the row's minimum are rounded
to float16 in addition."""


def check_answers(
    answers: NDArray[np.float32],
    goldens: Goldens,
    numbers: NDArray[np.int64],
    manifest: Manifest,
    tables: TablesFile,
    where: str,
    *,
    as_float16: bool = False,
) -> None:
    """Compares ``answers``, results for the goldens' bags, with both references of the goldens.

    Args:
        numbers: row numbers of the bags' ids, int64 [n].
        as_float16: whether values of int8 and int4 rows may be rounded to float16 before they are
            added up. FBGEMM's CUDA kernels do so (vecn.cuh: one multiply-add in half precision).
            Values of other rows may not be rounded.

    Raises:
        StoreError: a result differs from the published result, or differs from the source model's
            by more than its dtype explains. The message names the key.
    """
    bags = goldens.bags
    rounding = (
        _added_up(bags, numbers, manifest, partial(_half_bounds, tables)) if as_float16 else 0.0
    )
    bounds = check_published(answers, goldens, manifest, where, rounding)
    _compare(
        answers,
        goldens.source_answers,
        bounds + storing_bounds(bags, numbers, manifest, partial(stored_rows, tables)),
        manifest,
        bags,
        f"{where}: the vectors of {{}} are not the source model's, even for their dtype",
    )


def check_published(
    answers: NDArray[np.float32],
    goldens: Goldens,
    manifest: Manifest,
    where: str,
    rounding: NDArray[np.float32] | float = 0.0,
) -> NDArray[np.float32]:
    """Compares ``answers``, results for the goldens' bags, with those from the stored rows. Needs
    no rows.

    Args:
        rounding: how much the results may differ beyond the order of additions.

    Returns:
        Bounds of the allowed differences, in the shape of ``answers``.

    Raises:
        StoreError: a result differs from the published result. The message names the key.
    """
    stored, bags = goldens.stored_answers, goldens.bags
    bounds = SUMS_TOLERANCE * largest_per_key(stored, bags, manifest) + rounding
    problem = f"{where}: the vectors of {{}} are not the published ones"
    _compare(answers, stored, bounds, manifest, bags, problem)
    return bounds


def least_precise(*dtypes: str) -> str:
    """Returns the dtype with the largest tolerance in TRAINED_TOLERANCES."""
    return max(dtypes, key=TRAINED_TOLERANCES.__getitem__)


def is_near(found: NDArray[np.float32], answers: NDArray[np.float32], dtype: str) -> bool:
    """Returns whether ``found``, outputs of a training model, match ``answers`` for its ``dtype``.

    The tolerance is that of TRAINED_TOLERANCES.
    """
    bound = TRAINED_TOLERANCES[dtype] * float(np.abs(answers).max(initial=0.0))
    return bool((np.abs(found - answers) <= max(bound, np.finfo(np.float32).tiny)).all())


def storing_bounds(
    bags: Bags, numbers: NDArray[np.int64], manifest: Manifest, rows_of: RowsOf
) -> NDArray[np.float32]:
    """Returns how much the rounding of rows to their stored dtypes may change the results of
    ``bags``.

    Args:
        numbers: row numbers of the bags' ids, int64 [n].
        rows_of: returns the stored rows.
    """
    return _added_up(bags, numbers, manifest, partial(_row_bounds, rows_of))


def _compare(
    answers: NDArray[np.float32],
    expected: NDArray[np.float32],
    bounds: NDArray[np.float32],
    manifest: Manifest,
    bags: Bags,
    problem: str,
) -> None:
    # The comparison is negated because a NaN in the results must count as wrong.
    wrong = ~(np.abs(answers - expected) <= np.maximum(bounds, np.finfo(np.float32).tiny))
    for key, block in blocks(manifest, bags):
        if wrong[block].any():
            off = float(np.abs(answers[block] - expected[block]).max())
            largest = float(np.abs(expected[block]).max())
            raise StoreError(
                f"{problem.format(repr(key))}: off by {off:.3g} where the largest is {largest:.3g}"
            )


def check_finite(answers: NDArray[np.float32], manifest: Manifest, bags: Bags, where: str) -> None:
    """Raises InvalidModelError if a result of a model is NaN or infinite."""
    for key, block in blocks(manifest, bags):
        broken = answers[block][~np.isfinite(answers[block])]
        if broken.size:
            raise InvalidModelError(
                f"{where}: the vectors of {key!r} hold {broken[0]}: a row is not finite, or the "
                "sum of a bag is beyond the range of float32"
            )


def blocks(manifest: Manifest, bags: Bags) -> list[tuple[str, tuple[slice, slice]]]:
    """Returns the index of each key's results: columns if the model is pooled, otherwise rows."""
    everything = slice(None)
    if manifest.is_pooled:
        return [(one.key, (everything, slice(one.start, one.end))) for one in manifest.columns]
    totals = bags.lengths.sum(axis=1)
    found = []
    start = 0
    for one in manifest.columns:
        end = start + int(totals[one.feature])
        found.append((one.key, (slice(start, end), everything)))
        start = end
    return found


def largest_per_key(
    answers: NDArray[np.float32], bags: Bags, manifest: Manifest
) -> NDArray[np.float32]:
    """Returns the largest magnitude of each key's results, in the shape of ``answers``."""
    scales = np.zeros_like(answers)
    for _, block in blocks(manifest, bags):
        scales[block] = np.abs(answers[block]).max(initial=0.0)
    return scales


def _added_up(
    bags: Bags, numbers: NDArray[np.int64], manifest: Manifest, bounds_of: RowsOf
) -> NDArray[np.float32]:
    """Returns the error bounds of the results, given the error bounds of the rows' values.

    ``bounds_of`` returns the bounds of the values of each row.
    """
    weights = None if bags.weights is None else np.abs(bags.weights)
    return pool(manifest, Bags(bags.ids, bags.lengths, weights), numbers, bounds_of)


def _row_bounds(
    rows_of: RowsOf, table: TableSpec, wanted: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Returns how much the stored values of rows ``wanted`` may differ from the source's.

    The bounds [n, dim] follow from the rounding to the stored dtype.
    """
    relative, floor = _ROUNDING[table.dtype]
    rows = rows_of(table, wanted)
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    bounds = np.float32(_MARGIN) * (largest * relative + floor)
    return np.broadcast_to(bounds, rows.shape).astype(np.float32)


def _half_bounds(
    tables: TablesFile, table: TableSpec, wanted: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Returns how much rounding to float16 may change the stored values of rows ``wanted``.

    The bounds [n, dim] are 0 unless the table is int8 or int4.
    """
    rows = stored_rows(tables, table, wanted)
    if table.dtype not in CODES_MAX:
        return np.zeros_like(rows)
    return np.abs(rows) * np.float32(_HALF) + np.float32(_HALF_MIN)
