"""Compares the goldens of a delta with the rows after it. Never imports torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import GoldensError
from embedserve_store.format.delta_goldens import DeltaGoldens
from embedserve_store.format.manifest import Manifest
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.parity import (
    TRAINED_TOLERANCES,
    blocks,
    largest_per_key,
    storing_bounds,
)
from embedserve_store.goldens.reference_pooling import RowsOf, pool


def check_delta_goldens(
    goldens: DeltaGoldens, manifest: Manifest, rows_of: RowsOf, where: str
) -> NDArray[np.float32]:
    """Compares the results from the rows after a delta with its goldens.

    The tolerance is that of a version's goldens against its source model: rounding to the stored
    dtypes, sums in another order, and the precision of the training model.

    Args:
        rows_of: returns rows as they are after the delta.

    Returns:
        Bounds in the shape of ``goldens.answers``, for ``check_results``.

    Raises:
        GoldensError: a result is another.
    """
    bags = Bags(goldens.numbers, goldens.lengths, goldens.weights)
    tolerance = np.float32(TRAINED_TOLERANCES[goldens.dtype])
    bounds: NDArray[np.float32] = tolerance * largest_per_key(goldens.answers, bags, manifest)
    bounds = bounds + storing_bounds(bags, goldens.numbers, manifest, rows_of)
    bounds = np.maximum(bounds, np.finfo(np.float32).tiny)
    check_results(pool(manifest, bags, goldens.numbers, rows_of), goldens, bounds, manifest, where)
    return bounds


def check_results(
    results: NDArray[np.float32],
    goldens: DeltaGoldens,
    bounds: NDArray[np.float32],
    manifest: Manifest,
    where: str,
) -> None:
    """Raises GoldensError unless ``results``, those of a lookup, are within ``bounds`` of the
    goldens. The message names key, table and position of the first that is not."""
    # The comparison is negated because a NaN in the results must count as wrong.
    wrong = ~(np.abs(results - goldens.answers) <= bounds)
    bags = Bags(goldens.numbers, goldens.lengths, goldens.weights)
    item = "example" if manifest.is_pooled else "row"
    for columns, (key, block) in zip(manifest.columns, blocks(manifest, bags), strict=True):
        if not wrong[block].any():
            continue
        at = tuple(int(one[0]) for one in np.nonzero(wrong[block]))
        found, expected, bound = (part[block][at] for part in (results, goldens.answers, bounds))
        raise GoldensError(
            f"{where}: goldens: {key!r} (table {columns.table.name!r}), {item} {at[0]}, column "
            f"{at[1]}: the rows give {found:.6g}, training had {expected:.6g}, and their dtypes "
            f"explain {bound:.2g}; {int(wrong.sum())} of {wrong.size} values differ"
        )
