"""Tests that the committed references are the output of docs/generate.py and name everything."""

import importlib.util
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pytest
from documents import ROOT
from prometheus_client import Metric
from server.fake_deltas import shared_state
from server.fake_models import ruled_info
from server.fake_parts import FakeParts, in_parts
from typer.main import get_group

from embedserve.commands.cli import app
from embedserve.config import DEFAULT_LIMITS
from embedserve.deltas.status import DeltaStatus
from embedserve.metrics.metrics import CounterRoom, Metrics
from embedserve.metrics.model_metrics import COLUMNS_MIN
from embedserve.metrics.shard_metrics import PartStats
from embedserve.processes.memory_bounds import memory_bytes_max
from embedserve_store.format.delta_manifest import LinePosition
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import Plan, Shard, TablePlan
from embedserve_store.terminal.sizes import human_bytes

DOCS = ROOT / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", generator().MADE)
def test_generated_files_are_current(name: str) -> None:
    made = generator().MADE[name]()
    assert (ROOT / name).read_text("utf-8") == made, "run make docs and commit the result"


def over_two_ranks(tables: Sequence[TableSpec]) -> Plan:
    """Returns a plan with one row of each table on rank 0 and the others on rank 1."""
    return Plan(
        2,
        {
            table.name: TablePlan(
                "row_wise",
                (
                    Shard(0, 0, 1, 0, table.embedding_dim),
                    Shard(1, 1, table.num_embeddings - 1, 0, table.embedding_dim),
                ),
            )
            for table in tables
        },
        {},
    )


class OneCaller:
    """Statistics of a single named caller that has sent a request."""

    names = frozenset({"ranker"})

    def take_counts(self) -> list[tuple[str, dict[str, int]]]:
        return [("ranker", {"OK": 1})]


def families_with_samples() -> list[Metric]:
    """Returns the metrics of a server with samples of every family. It has accepted and rejected
    requests over TLS to a model of every id rule, row_wise over two ranks, and shadows another
    version. It calls a shard, too."""
    model = ruled_info()
    status = DeltaStatus(LinePosition(7, 0, "0" * 64))
    deltas = shared_state(status, has_broker=True)
    shards = FakeParts([(0, PartStats())], {("ruled", model.version): [2]})
    plan = over_two_ranks(model.tables)
    served = in_parts(replace(model, plan=plan, deltas=deltas), shards, parts=1)
    metrics = Metrics([served], room=CounterRoom(1, COLUMNS_MIN, parts=1))
    metrics.shards.source = shards
    metrics.models["ruled"].version.shadow.begin(1)
    metrics.protocols["rest"].count_answered(0.001, 100)
    metrics.protocols["grpc"].count_rejected("INTERNAL", "why", 0.001)
    metrics.callers.callers = OneCaller()
    metrics.tls.expires_s = lambda: 2e9
    return list(metrics.registry().collect())


@pytest.mark.parametrize("family", families_with_samples(), ids=lambda family: family.name)
def test_metrics_page_lists_every_metric_with_its_labels(family: Metric) -> None:
    assert family.samples
    lines = (DOCS / "metrics.md").read_text("utf-8").splitlines()
    suffix = "_total" if family.type == "counter" else ""
    (line,) = [line for line in lines if line.startswith(f"| `{family.name}{suffix}` |")]
    _, _, kind, labels, _, sentence, _ = (cell.strip() for cell in line.split("|"))
    assert kind == family.type
    assert sentence.rstrip(".") == family.documentation.rstrip(".")
    for sample in family.samples:
        assert [name.strip("`") for name in labels.split(", ") if name] == [
            name for name in sample.labels if name != "le"
        ]


@pytest.mark.parametrize(
    "example", [one for examples in generator().COMMANDS.values() for one in examples.values()]
)
def test_command_examples_are_accepted_by_their_commands(example: str) -> None:
    typed, _, _ = example.partition(" >> ")
    program, name, *arguments = shlex.split(typed)
    assert program == "embedserve"
    get_group(app).commands[name].make_context(name, arguments)


@pytest.mark.parametrize("page", ["README.md", "docs/sizing.md"])
def test_pages_name_the_memory_bound_of_clients(page: str) -> None:
    bound = re.search(r"\[([\d.]+ \w+)\]\([\w/]*settings\.md#memory\)", (ROOT / page).read_text())
    assert bound is not None
    assert bound[1] == human_bytes(memory_bytes_max(DEFAULT_LIMITS))
