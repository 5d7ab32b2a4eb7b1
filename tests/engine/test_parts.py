"""Tests of parts that are restored as versions: the kernels pass the goldens of each part."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.live_stores import GPU
from pooled import collection
from torchrec import PoolingType
from unpooled import unpooled_collection

from embedserve.engine.compile import EAGER, SCRIPTED
from embedserve.engine.programs import Programs
from embedserve.engine.restore import restore
from embedserve_store import ModelStore, ModelVersion, Part, StoreError, publish
from embedserve_store.memory.resident_tables import make_resident

PARTS = 2


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publishes "weighted", and "ranks" whose plan has two ranks, in PARTS parts."""
    store = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    for name, dtype, ranks in (("weighted", "int8", 1), ("ranks", "float16", 2)):
        tables = [
            ("a", 501, 16, ["x"], PoolingType.MEAN),
            ("b", 300, 16, ["x", "y"], PoolingType.SUM),
        ]
        ebc = collection(tables, is_weighted=name == "weighted")
        publish(ebc, store, model=name, dtype=dtype, hosts=PARTS, world_size=ranks)
    return store


def load(store: Path, model: str, number: int) -> ModelVersion:
    return ModelStore(store, selection=Part(number, PARTS)).load(model)


@pytest.mark.parametrize("number", range(PARTS))
@pytest.mark.parametrize("model", ["weighted", "ranks"])
def test_kernels_of_a_part_return_results_of_its_rows(store: Path, model: str, number: int) -> None:
    """Compiles lookups of the second part, whose rows start within the rows of the version."""
    engine = restore(load(store, model, number), "cpu", is_eager=number == 0)
    assert engine.lookup_kind == (SCRIPTED if number else EAGER)


@pytest.mark.parametrize("number", range(PARTS))
@pytest.mark.parametrize("model", [pytest.param(one, marks=GPU) for one in ("weighted", "ranks")])
def test_part_is_restored_on_a_gpu(store: Path, model: str, number: int) -> None:
    restore(load(store, model, number), "cuda")


def test_resident_part_is_restored_on_another_number_of_ranks(store: Path) -> None:
    restore(make_resident(load(store, "weighted", 1)), "cpu:3", is_eager=True)


def test_golden_mismatch_of_a_part_fails_the_restore(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, other = load(store, "weighted", 1), load(store, "weighted", 0)
    goldens = other.goldens()
    assert not np.array_equal(goldens.stored_answers, version.goldens().stored_answers)
    monkeypatch.setattr(ModelVersion, "goldens", lambda self: goldens)
    with pytest.raises(StoreError, match="the vectors of 'x@a' are not the published ones"):
        restore(version, "cpu", is_eager=True)


@pytest.mark.parametrize("is_pooled", [True, False])
def test_program_is_not_reused_if_table_offsets_differ(tmp_path: Path, is_pooled: bool) -> None:
    """Checks a program whose tables move in the file. Table c is in the other part.

    Restoring compares goldens.
    """
    sharding = {"a": "row_wise", "b": "row_wise", "c": "table_wise"}
    options: dict[str, Any] = {"sharding": sharding, "hosts": PARTS, "world_size": 2}
    programs, offsets, compiled = Programs(), [], []
    for rows in (500, 512, 512):
        tables = [("a", 100, ["x"]), ("b", 300, ["x"]), ("c", rows, ["z"])]
        source = (
            collection([(name, count, 16, names, PoolingType.SUM) for name, count, names in tables])
            if is_pooled
            else unpooled_collection(tables)
        )
        publish(source, tmp_path, model="m", layout_changed=True, **options)
        parts = [load(tmp_path, "m", number) for number in range(PARTS)]
        [version] = [one for one in parts if "c" not in one.tables.tables]
        engine = restore(version, "cpu", programs=programs)
        assert engine.lookup_kind == SCRIPTED
        offsets.append(version.tables.offsets)
        compiled.append(programs.add(engine))
    assert offsets[0] != offsets[1] == offsets[2]
    assert compiled == [True, True, False]
