"""What compares the answers of `make swaps` finds wrong ones; and a few swaps."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from random import Random

import numpy as np
import pytest
from soak.swaps import Request, Swaps, print_report, publish, row_values

from embedserve_proto import embedding_pb2 as pb

ROWS = 500


def answer(request: Request, version: int, rows_of: int) -> bytes:
    """One that names ``version``, with the rows of another."""
    sums = [
        row_values(rows_of, table, ids).sum(0, dtype=np.float32)
        for table, ids in enumerate(request.ids)
    ]
    values = np.concatenate(sums).astype("<f4").tobytes()
    return pb.EmbedResponse(version=version, values=values, batch_size=1).SerializeToString()


def test_answers_are_compared_with_the_version_that_they_name() -> None:
    request = Request.of(Random(1), ROWS)
    assert any(ids.size for ids in request.ids)
    for _ in range(2):
        assert request.version_of(answer(request, 3, rows_of=3)) == 3
        assert request.version_of(answer(request, 3, rows_of=4)) is None
        assert request.version_of(answer(request, 4, rows_of=4)) == 4


@pytest.mark.soak
@pytest.mark.parametrize("workers", [1, 2])
def test_a_few_swaps(tmp_path: Path, workers: int) -> None:
    if shutil.which("wrk") is None:
        pytest.skip("wrk is not installed")
    for version in (1, 2, 3):
        publish(tmp_path / "store", version, ROWS)
    chosen = argparse.Namespace(rows=ROWS, workers=workers, swaps=6, every_s=0.5, seed=1)
    swaps = Swaps(tmp_path, tmp_path / "store", chosen)
    swaps.run()
    print_report(swaps)
    assert len(swaps.switches) == 6
    assert set(swaps.seen.answers) == {1, 2, 3}
    assert swaps.seen.wrong == []
    assert swaps.load["requests"] > 0
    assert (swaps.load["wrong"], swaps.load["errors"]) == (0, 0)
