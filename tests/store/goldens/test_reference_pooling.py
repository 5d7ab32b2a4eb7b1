"""Tests of the reference pooling: it equals torch's, except for weighted means, where it equals
FBGEMM's."""

import numpy as np
import pytest
import torch
from store.conftest import MakeEbc

from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.reference_pooling import pool
from embedserve_store.goldens.sampled_bags import sample_bags
from embedserve_store.sources import live


@pytest.mark.parametrize(("is_weighted", "pooling"), [(False, None), (True, "sum")])
def test_reference_pooling_matches_the_torch_module(
    make_ebc: MakeEbc, is_weighted: bool, pooling: str | None
) -> None:
    ebc = make_ebc(is_weighted=is_weighted, pooling=pooling)
    manifest = Manifest("m", 1, live.describe(ebc), is_weighted)
    bags = sample_bags(manifest, {})

    def rows_of(table: TableSpec, ids: np.ndarray) -> np.ndarray:
        rows: np.ndarray = ebc.embedding_bags[table.name].weight.detach().numpy()[ids]
        return rows

    np.testing.assert_allclose(
        pool(manifest, bags, bags.ids, rows_of),
        live.answers(ebc, manifest, bags),
        rtol=1e-5,
        atol=1e-6,
    )


def test_weighted_mean_divides_by_the_count() -> None:
    manifest = Manifest("m", 1, (TableSpec("t", 9, 4, ("t",), "mean", "float32"),), True)
    bags = sample_bags(manifest, {})
    rows = torch.arange(36.0).reshape(9, 4).numpy()
    pooled = pool(manifest, bags, bags.ids, lambda _, ids: rows[ids])
    assert bags.weights is not None
    expected = (bags.weights[0] * rows[0] + bags.weights[1] * rows[8]) / 2
    np.testing.assert_allclose(pooled[0], expected, rtol=1e-6)
    assert not pooled[1].any()
