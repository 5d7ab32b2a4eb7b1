"""Tests of tracing: a trace is used only if it is the same for every batch."""

from pathlib import Path

import pytest
import torch
from pooled import collection
from reference import check_vectors, stored_rows
from torch import nn
from torchrec import PoolingType
from torchrec.fx import Tracer

from embedserve.engine.compile import TRACED
from embedserve.engine.restore import restore
from embedserve.engine.trace import trace
from embedserve_store import ModelStore, publish

CPU = torch.device("cpu")

# The warning matters to callers that do not compare traces. As an error, torch leaves it set and
# continues. Then it surfaces at the next check by Python: rarely, and as a SystemError.
pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")


class Sums(nn.Module):
    """Adds up the ids of a batch, at once or by slices whose sizes are Python numbers."""

    def __init__(self, *, by_slices: bool) -> None:
        super().__init__()
        self.by_slices = by_slices

    def forward(
        self, ids: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        values = ids if weights is None else ids * weights
        if self.by_slices:
            return torch.stack([part.sum() for part in values.split(lengths.tolist())])
        return values.sum()


def test_batch_independent_module_is_traced() -> None:
    traced = trace(Sums(by_slices=False), 2, CPU, is_weighted=False)
    assert traced is not None
    assert traced(torch.arange(5), torch.tensor([2, 3])) == 10
    assert traced(torch.arange(9), torch.tensor([9, 0])) == 36


def test_weights_are_an_input_of_the_trace() -> None:
    traced = trace(Sums(by_slices=False), 2, CPU, is_weighted=True)
    assert traced is not None
    weights = torch.tensor([0.5, 2.0])
    assert traced(torch.tensor([4, 1]), torch.tensor([1, 1]), weights) == 4


def test_batch_dependent_module_is_not_traced() -> None:
    assert trace(Sums(by_slices=True), 2, CPU, is_weighted=False) is None


def test_module_that_fails_to_trace_is_not_traced() -> None:
    class UntraceableModule(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("unsupported output type")

    assert trace(UntraceableModule(), 2, CPU, is_weighted=False) is None


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_tables_on_one_rank_use_a_traced_lookup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: str
) -> None:
    def fail_if_scripted(*args: object, **options: object) -> None:
        raise AssertionError("was scripted")

    monkeypatch.setattr(Tracer, "trace", fail_if_scripted)
    tables = [
        ("a", 50, 16, ["of_a"], PoolingType.SUM),
        ("b", 7, 64, ["of_b"], PoolingType.MEAN),
        ("c", 300, 8, ["of_c"], PoolingType.SUM),
    ]
    publish(collection(tables), tmp_path, model="traced", sharding=sharding)
    version = ModelStore(tmp_path).load("traced")
    engine = restore(version)
    assert engine.lookup_kind == TRACED
    for batch_size in (1, 2, 64, 301):
        check_vectors(engine.lookup, version, stored_rows(version), batch_size)
