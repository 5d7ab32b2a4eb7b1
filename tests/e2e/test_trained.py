"""Tests of the path from a real distributed training run to serving.

Models are trained and saved with torch.distributed.checkpoint over 2 and 4 processes, published by
the command line, and served on 1, 2 and 4 ranks.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from reference import assert_same
from running_servers import Running, run_warm_command, running
from trained import Trained

from embedserve_client import EmbedClient, GrpcEmbedClient
from embedserve_store import publish, read_description

AS_TRAINED = "user=row_wise,item=table_wise,tag=column_wise,country=data_parallel,device=row_wise"
BY_TABLE = dict(part.split("=") for part in AS_TRAINED.split(","))
PLANS: dict[str, tuple[str | dict[str, str], int]] = {
    "one": ("table_wise", 1),
    "mixed-four": (BY_TABLE, 4),
    "rows-four": ("row_wise", 4),
}
"""Model to sharding and world size. The command line publishes mixed-two."""


TRAINERS = pytest.mark.parametrize("trainers", [2, 4], ids=["2 trainers", "4 trainers"])


@dataclass(frozen=True)
class ServedModels:
    trained: dict[int, Trained]
    """Training runs by number of processes."""
    store: Path
    server: Running


@pytest.fixture(scope="module")
def served(
    trained_by: Callable[[int], Trained], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModels]:
    """Serves the models of both training runs on one server, which compiles each plan once."""
    folder = tmp_path_factory.mktemp("served")
    store = folder / "store"
    trained = {trainers: trained_by(trainers) for trainers in (2, 4)}
    for one in trained.values():
        publish_plans(one, store)
    with running(store, folder / "log", "--default-model", "one-by-2") as server:
        yield ServedModels(trained, store, server)


def publish_plans(trained: Trained, store: Path) -> None:
    by = f"by-{trained.world_size}"
    options = ("--model", f"mixed-two-{by}", "--sharding", AS_TRAINED, "--world-size", 2)
    done = run_warm_command("publish", trained.checkpoint, trained.description, store, *options)
    assert done.returncode == 0, done.stderr
    assert re.search(r"skipped, as not described: .* more of \d+ entries", done.stderr)
    description = read_description(trained.description)
    for model, (sharding, world_size) in PLANS.items():
        publish(
            trained.checkpoint,
            store,
            model=f"{model}-{by}",
            tables=description,
            sharding=sharding,
            world_size=world_size,
        )


def check_models(server: Running, trained: Trained, models: tuple[str, ...]) -> None:
    expected = np.concatenate([trained.answers[feature] for _, feature, _ in trained.features], 1)
    with EmbedClient(server.http) as rest, GrpcEmbedClient(server.grpc) as grpc:
        for model in models:
            over_rest = rest.embed(trained.bags, model=model)
            assert_same(over_rest.values, expected)
            np.testing.assert_array_equal(
                over_rest.values, grpc.embed(trained.bags, model=model).values
            )


@TRAINERS
def test_every_plan_returns_the_vectors_of_the_trainer(served: ServedModels, trainers: int) -> None:
    models = tuple(f"{model}-by-{trainers}" for model in ("mixed-two", *PLANS))
    check_models(served.server, served.trained[trainers], models)


@TRAINERS
def test_plan_for_two_ranks_is_served_on_other_numbers_of_ranks(
    served: ServedModels, trainers: int
) -> None:
    ranks = 4 if trainers == 2 else 1
    log = served.store.parent / f"resharded-{ranks}.log"
    model = f"mixed-two-by-{trainers}"
    with running(served.store, log, "--model", model, "--devices", f"cpu:{ranks}") as server:
        check_models(server, served.trained[trainers], (model,))
    assert "planned anew under the stored constraints" in log.read_text()
    assert f"over {ranks} cpu rank" in log.read_text()
