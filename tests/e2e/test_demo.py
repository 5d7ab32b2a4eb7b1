"""The README's path: train, publish, serve, ask over REST and gRPC, compare with the checkpoint."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import assert_same, pooled
from servers import Running, run_command, running

from embedserve_client import EmbedClient, GrpcEmbedClient
from embedserve_store import ModelStore

FEATURES = {
    "history": [[111161, 1, 468569], [], [109830]],
    "candidate": [[120737], [1375666], [2171847]],
    "candidate_genres": [["Action", "Drama"], [], ["Western"]],
    "user": [[37287], [1], [2]],
}
"""Movies by IMDb id, of which 1 is in no table; genres by name; users by their id."""
TABLE_OF = {
    "history": ("movie", "mean"),
    "candidate": ("movie", "mean"),
    "candidate_genres": ("genre", "mean"),
    "user": ("user", "sum"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    done = run_command("demo", folder / "store", "--checkpoint", folder / "demo.pt")
    assert done.returncode == 0, done.stderr
    assert "RMSE" in done.stderr
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder / "store", folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def from_checkpoint(folder: Path) -> np.ndarray:
    """float32 [3, sum of dims], by nn.EmbeddingBag from the saved state dict."""
    weights = torch.load(folder / "demo.pt", weights_only=True)
    blocks = []
    for feature, (table, pooling) in TABLE_OF.items():
        lines = (folder / f"demo.{table}.txt").read_text().splitlines()
        rows = {line: row for row, line in enumerate(lines)}
        bags = [[rows[str(i)] for i in bag if str(i) in rows] for bag in FEATURES[feature]]
        weight = weights[f"ebc.embedding_bags.{table}.weight"].numpy()
        blocks.append(pooled(weight, bags, pooling))
    return np.concatenate(blocks, axis=1)


def test_rest_and_grpc_give_the_vectors_of_the_checkpoint(server, from_checkpoint) -> None:
    with EmbedClient(server.http) as rest, GrpcEmbedClient(server.grpc) as grpc:
        over_rest, over_grpc = rest.embed(FEATURES), grpc.embed(FEATURES)
    assert tuple(over_rest.keys) == tuple(TABLE_OF)
    np.testing.assert_array_equal(over_rest.values, over_grpc.values)
    assert_same(over_rest.values, from_checkpoint)


def test_json_gives_the_same_float32(server, from_checkpoint) -> None:
    body = json.dumps({"features": FEATURES})
    answer = json.loads(
        subprocess.run(
            ["curl", "-sf", f"{server.http}/embed", "-d", body], capture_output=True, check=True
        ).stdout
    )
    assert answer["model"] == "movies"
    assert_same(np.array(answer["values"], np.float32), from_checkpoint)
    with EmbedClient(server.http) as rest:
        np.testing.assert_array_equal(
            np.array(answer["values"], np.float32), rest.embed(FEATURES).values
        )


def test_the_printed_curl_works_as_pasted(server) -> None:
    line = next(line.strip() for line in server.log.read_text().splitlines() if "curl" in line)
    done = subprocess.run(shlex.split(line), capture_output=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["length_per_key"] == [32, 32, 16, 64]
    assert len(answer["values"]) == 2


def test_result_becomes_a_keyed_tensor(server) -> None:
    with EmbedClient(server.http) as rest:
        keyed = rest.embed(FEATURES).to_keyed_tensor()
    assert keyed.keys() == list(TABLE_OF)
    assert keyed["user"].shape == (3, 64)


def test_demo_if_missing_does_not_train_again(folder) -> None:
    done = run_command("demo", folder / "store", "--if-missing")
    assert done.returncode == 0
    assert "has model movies already" in done.stderr
    assert not (folder / "store" / "movies" / "2").exists()


def test_the_checkpoint_publishes_as_the_demo_does(folder, server) -> None:
    files = (folder / "demo.pt", folder / "demo.yaml", folder / "again")
    done = run_command("publish", *files, "--model", "movies", "--dtype", "user=int8")
    assert done.returncode == 0, done.stderr
    assert "user: 3,060 rows of 64 int8, ids by map, 203.2 KiB (561.8 KiB saved)" in done.stderr
    one, other = (ModelStore(folder / name).load("movies") for name in ("store", "again"))
    assert [t.ids for t in one.manifest.tables] == [t.ids for t in other.manifest.tables]
    np.testing.assert_array_equal(one.tables.rows("movie"), other.tables.rows("movie"))


def test_inspect_shows_tables_and_plan(folder) -> None:
    assert "movies" in run_command("inspect", folder / "store").stdout
    shown = run_command("inspect", folder / "store", "movies", "1").stdout
    assert "31,245" in shown
    assert "15,623 + 15,622 rows" in shown
    assert "row_wise" in shown
