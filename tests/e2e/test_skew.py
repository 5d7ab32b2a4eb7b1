"""Tests of plans from a server's metrics: the predicted balance is the measured one."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from running_servers import Running, run_warm_command, running
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from embedserve.commands.planning.access_stats import read_access_stats
from embedserve.commands.running_server import ServerClient
from embedserve_client import EmbedClient
from embedserve_store import ModelStore, publish
from embedserve_store.plans.plan import Plan, Shard, TablePlan, read_plan

ROWS, HALF = 1000, 500
DIMS = {"hot": 16, "a": 16, "b": 32, "c": 8}
IDS = {"hot": 12, "a": 6, "b": 3, "c": 6}
"""Number of ids in a bag."""
EXAMPLES, REQUESTS = 100, 20
HOT_FRACTION = 0.9
"""Fraction of the ids of hot that are in the rows of rank 0."""
CURRENT_PLAN = Plan(
    2,
    {
        "hot": TablePlan("row_wise", (Shard(0, 0, HALF, 0, 16), Shard(1, HALF, HALF, 0, 16))),
        **{name: TablePlan("table_wise", (Shard(0, 0, ROWS, 0, DIMS[name]),)) for name in "abc"},
    },
    {},
)
SHARE_ERROR_MAX = 0.03
"""Tolerance for the share of a row_wise table's ranks, which is sampled from some batches."""


@pytest.fixture(scope="module")
def ebc() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device="cpu",
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=dim,
                num_embeddings=ROWS,
                feature_names=[name],
                pooling=PoolingType.SUM,
            )
            for name, dim in DIMS.items()
        ],
    )


@pytest.fixture(scope="module")
def store(ebc: EmbeddingBagCollection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("skew") / "store"
    publish(ebc, store, model="m", sharding=CURRENT_PLAN)
    return store


def send_requests(server: Running, model: str = "m") -> None:
    random = np.random.default_rng(7)
    with EmbedClient(server.http) as client:
        for _ in range(REQUESTS):
            ids = {name: random.integers(0, ROWS, (EXAMPLES, n)) for name, n in IDS.items()}
            is_tail = random.random(ids["hot"].shape) > HOT_FRACTION
            ids["hot"] = ids["hot"] % HALF + np.where(is_tail, HALF, 0)
            client.embed({name: bags.tolist() for name, bags in ids.items()}, model=model)


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Running]:
    """Runs a server of version 1, after requests."""
    with running(store, store.parent / "log", "--model", "m@1") as server:
        send_requests(server)
        yield server


def propose_plan(
    server: Running, store: Path, output: Path, *options: str
) -> tuple[str, list[float]]:
    """Returns the output, and the predicted shares of the bytes that ranks 0 and 1 read."""
    arguments = ("m", "1", "--from-metrics", server.http, "--output", output)
    done = run_warm_command("plan", store, *arguments, *options)
    assert done.returncode == 0, done.stderr
    lines = [re.findall(r"([\d.]+)%", line) for line in done.stdout.splitlines()]
    ranks = [line for line in lines if len(line) == 4]
    assert len(ranks) == 2, done.stdout
    assert abs(float(ranks[0][1]) - 100 * current_share()) < 100 * SHARE_ERROR_MAX
    return done.stdout + done.stderr, [float(line[3]) / 100 for line in ranks]


def read_bytes() -> dict[str, int]:
    return {name: 4 * DIMS[name] * IDS[name] * EXAMPLES * REQUESTS for name in DIMS}


def current_share() -> float:
    """Returns the share of rank 0 under the current plan."""
    read = read_bytes()
    return 1 - (1 - HOT_FRACTION) * read["hot"] / sum(read.values())


def test_predicted_balance_equals_the_measured_balance(
    server: Running, store: Path, ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    whole, divided = tmp_path / "whole.json", tmp_path / "divided.json"
    whole_output, predicted = propose_plan(server, store, whole)
    assert "an estimate" not in whole_output
    read = read_bytes()
    best = (read["hot"] + read["c"]) / sum(read.values())
    assert sorted(predicted) == pytest.approx([1 - best, best], abs=0.001)
    by_rows, predicted_by_rows = propose_plan(server, store, divided, "--sharding", "hot=row_wise")
    assert "hot (44% of the bytes read): divided by rows as it is today" in by_rows
    assert max(predicted_by_rows) < max(predicted)
    assert read_plan(divided).tables["hot"] == CURRENT_PLAN.tables["hot"]
    for output in (whole, divided):
        publish(ebc, store, model="m", sharding=read_plan(output))
    names = ("--model", "m@2", "--model", "m@3")
    with running(store, tmp_path / "log", *names) as later:
        for version, shares, error in (
            (2, predicted, 0.001),
            (3, predicted_by_rows, SHARE_ERROR_MAX),
        ):
            send_requests(later, f"m@{version}")
            published = ModelStore(store).load("m", version)
            client = ServerClient(later.http)
            measured = read_access_stats(client, published.manifest, published.plan)
            total = sum(measured.read_bytes)
            assert [one / total for one in measured.read_bytes] == pytest.approx(shares, abs=error)


def test_plans_for_other_world_sizes_and_from_a_plan_file(
    server: Running, store: Path, tmp_path: Path
) -> None:
    arguments = ("m", "1", "--from-metrics", server.http)
    one = run_warm_command("plan", store, *arguments, "--world-size", "1")
    (ratios,) = [line.split() for line in one.stdout.splitlines() if line.startswith("max/mean")]
    assert ratios[-3:] == ["1.00"] * 3
    three = run_warm_command(
        "plan", store, *arguments, "--world-size", "3", "--sharding", "row_wise"
    )
    assert "hot (44% of the bytes read): not counted by these ranges of its rows" in three.stderr
    own_plan = tmp_path / "own.json"
    done = run_warm_command(
        "plan", store, *arguments, "--sharding", "table_wise", "--output", own_plan
    )
    assert done.returncode == 0, done.stderr
    again = run_warm_command("plan", store, *arguments, "--sharding", own_plan)
    assert again.stdout == done.stdout
