"""The parity gate: are these the vectors that were trained, as closely as their dtype allows?

Compares answers to a version's goldens with the rows as stored (sharply: only the order of the
additions may differ, and on GPUs what FBGEMM rounds int8 and int4 values to) and with the source
model (within what rounding to the dtype may cost, too). The publisher asks before a version
appears, a server before it is ready. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import CODES_MAX, TableSpec
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.goldens.goldens_file import Bags, Goldens
from embedserve_store.goldens.reference_pooling import RowsOf, pool, stored_rows

SUMS_TOLERANCE = 1e-5
"""Relative to the largest magnitude of a golden answer: float32 sums in another order."""

TRAINED_TOLERANCES = {"float32": SUMS_TOLERANCE, "float16": 2.0**-8, "bfloat16": 2.0**-5}
"""By the dtype of the training model's rows, relative to the largest magnitude of a key's answers:
it may add halves up as such."""

_HALF = 2.0**-11
"""Largest relative error of rounding to float16."""
_HALF_MIN = 2.0**-25
"""Largest error of rounding to a float16 below its normal range."""
_MARGIN = 1.5


@dataclass(frozen=True)
class _Rounding:
    """What storing a value may change it by: relative * (largest magnitude of its row) + floor.

    A quantized row spans at most twice its largest magnitude in ``codes`` steps. Half a step
    is rounding; the step and the row's minimum are float16 themselves.
    """

    relative: float
    floor: float

    @classmethod
    def of_codes(cls, codes: int) -> _Rounding:
        return cls(2 * (0.5 / codes + _HALF) + _HALF, (codes + 1) * _HALF_MIN)


_ROUNDING = {
    "float32": _Rounding(0.0, 0.0),
    "float16": _Rounding(_HALF, _HALF_MIN),
    **{dtype: _Rounding.of_codes(codes) for dtype, codes in CODES_MAX.items()},
}


def check_answers(
    answers: NDArray[np.float32],
    goldens: Goldens,
    numbers: NDArray[np.int64],
    manifest: Manifest,
    tables: TablesFile,
    where: str,
    *,
    in_half: bool = False,
) -> None:
    """Compares ``answers`` to the goldens' bags with both answers that they must match.

    Args:
        numbers: int64 [n], the rows that the bags' ids mean.
        where: the version, for errors.
        in_half: values of int8 and int4 rows may be rounded to float16 before they are added up, as
            FBGEMM's CUDA kernels round them (vecn.cuh: one multiply-add in half precision); those
            of other rows may not.

    Raises:
        StoreError: an answer is another than the published one, or further from the source
            model's than its dtype explains; names the key.
    """
    bags = goldens.bags
    bounds = SUMS_TOLERANCE * _largest_per_key(goldens.stored_answers, bags, manifest)
    if in_half:
        bounds = bounds + _added_up(bags, numbers, manifest, partial(_half_bounds, tables))
    _compare(
        answers,
        goldens.stored_answers,
        bounds,
        manifest,
        bags,
        f"{where}: the vectors of {{}} are not the published ones",
    )
    _compare(
        answers,
        goldens.source_answers,
        bounds + _added_up(bags, numbers, manifest, partial(_storing_bounds, tables)),
        manifest,
        bags,
        f"{where}: the vectors of {{}} are not the source model's, even for their dtype",
    )


def is_near(found: NDArray[np.float32], answers: NDArray[np.float32], dtype: str) -> bool:
    """Whether a training model whose rows are of ``dtype`` may answer ``found`` for ``answers``."""
    bound = TRAINED_TOLERANCES[dtype] * float(np.abs(answers).max(initial=0.0))
    return bool((np.abs(found - answers) <= max(bound, np.finfo(np.float32).tiny)).all())


def _compare(
    answers: NDArray[np.float32],
    expected: NDArray[np.float32],
    bounds: NDArray[np.float32],
    manifest: Manifest,
    bags: Bags,
    problem: str,
) -> None:
    # A NaN in the answers is never within the bounds.
    wrong = ~(np.abs(answers - expected) <= np.maximum(bounds, np.finfo(np.float32).tiny))
    if not wrong.any():
        return
    for key, block in _blocks(manifest, bags):
        if wrong[block].any():
            off = float(np.abs(answers[block] - expected[block]).max())
            largest = float(np.abs(expected[block]).max())
            raise StoreError(
                f"{problem.format(repr(key))}: off by {off:.3g} where the largest is {largest:.3g}"
            )


def _blocks(manifest: Manifest, bags: Bags) -> list[tuple[str, tuple[slice, slice]]]:
    """Where each key's answers lie: columns of a pooled model, rows of an unpooled one."""
    everything = slice(None)
    if manifest.is_pooled:
        return [(one.key, (everything, slice(one.start, one.end))) for one in manifest.columns]
    totals = bags.lengths.sum(axis=1)
    blocks = []
    start = 0
    for one in manifest.columns:
        end = start + int(totals[one.feature])
        blocks.append((one.key, (slice(start, end), everything)))
        start = end
    return blocks


def _largest_per_key(
    answers: NDArray[np.float32], bags: Bags, manifest: Manifest
) -> NDArray[np.float32]:
    """In the shape of ``answers``, each key's largest magnitude."""
    scales = np.zeros_like(answers)
    for _, block in _blocks(manifest, bags):
        scales[block] = np.abs(answers[block]).max(initial=0.0)
    return scales


def _added_up(
    bags: Bags, numbers: NDArray[np.int64], manifest: Manifest, bounds_of: RowsOf
) -> NDArray[np.float32]:
    """How far off answers may be where each value of a row may be as far off as ``bounds_of``."""
    weights = None if bags.weights is None else np.abs(bags.weights)
    return pool(manifest, Bags(bags.ids, bags.lengths, weights), numbers, bounds_of)


def _storing_bounds(
    tables: TablesFile, table: TableSpec, wanted: NDArray[np.int64]
) -> NDArray[np.float32]:
    """How far from the source's values those of rows ``wanted`` may be, for being stored in their
    dtype."""
    rounding = _ROUNDING[table.dtype]
    rows = stored_rows(tables, table, wanted)
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    bounds = np.float32(_MARGIN) * (largest * rounding.relative + rounding.floor)
    return np.broadcast_to(bounds, rows.shape).astype(np.float32)


def _half_bounds(
    tables: TablesFile, table: TableSpec, wanted: NDArray[np.int64]
) -> NDArray[np.float32]:
    """How far from the stored values of rows ``wanted`` they are once rounded to float16."""
    rows = stored_rows(tables, table, wanted)
    if table.dtype not in CODES_MAX:
        return np.zeros_like(rows)
    return np.abs(rows) * np.float32(_HALF) + np.float32(_HALF_MIN)
