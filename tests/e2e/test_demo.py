"""Tests of the README's path: train, publish, serve, request over REST and gRPC, compare.

They also run the examples of the documents as pasted.
"""

import json
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch
from documents import ROOT, Block, blocks
from e2e.demo_server import Demo
from forkserver import PYTHON, run_warm
from reference import assert_same, pooled
from running_servers import ANSWER_S_MAX, COMMAND_S_MAX, Running, run_command, run_warm_command
from server.arrow_streams import ARROW, metadata_in, read_table, stream_of, vectors

from embedserve_client import EmbedClient, GrpcEmbedClient
from embedserve_store import ModelStore

FEATURES: dict[str, list[list[Any]]] = {
    "history": [[111161, 1, 468569], [], [109830]],
    "candidate": [[120737], [1375666], [2171847]],
    "candidate_genres": [["Action", "Drama"], [], ["Western"]],
    "user": [[37287], [1], [2]],
}
"""Movies by IMDb id (1 is in no table), genres by name, users by their id."""
TABLE_OF = {
    "history": ("movie", "mean"),
    "candidate": ("movie", "mean"),
    "candidate_genres": ("genre", "mean"),
    "user": ("user", "sum"),
}


@pytest.fixture
def folder(demo: Demo) -> Path:
    return demo.folder


@pytest.fixture
def server(demo: Demo) -> Running:
    return demo.server


@pytest.fixture
def from_checkpoint(folder: Path) -> np.ndarray:
    """Returns float32 [3, sum of dims], computed by nn.EmbeddingBag from the saved state dict."""
    weights = torch.load(folder / "demo.pt", weights_only=True)
    blocks = []
    for feature, (table, pooling) in TABLE_OF.items():
        lines = (folder / f"demo.{table}.txt").read_text().splitlines()
        rows = {line: row for row, line in enumerate(lines)}
        bags = [[rows[str(i)] for i in bag if str(i) in rows] for bag in FEATURES[feature]]
        weight = weights[f"ebc.embedding_bags.{table}.weight"].numpy()
        blocks.append(pooled(weight, bags, pooling))
    return np.concatenate(blocks, axis=1)


def test_rest_and_grpc_return_the_vectors_of_the_checkpoint(
    server: Running, from_checkpoint: np.ndarray
) -> None:
    with EmbedClient(server.http) as rest, GrpcEmbedClient(server.grpc) as grpc:
        over_rest, over_grpc = rest.embed(FEATURES), grpc.embed(FEATURES)
    assert tuple(over_rest.keys) == tuple(TABLE_OF)
    np.testing.assert_array_equal(over_rest.values, over_grpc.values)
    assert_same(over_rest.values, from_checkpoint)


def test_json_returns_the_same_float32_values(server: Running, from_checkpoint: np.ndarray) -> None:
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


def test_printed_curl_command_works_as_pasted(server: Running) -> None:
    line = next(line.strip() for line in server.log.read_text().splitlines() if "curl" in line)
    done = subprocess.run(shlex.split(line), capture_output=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["length_per_key"] == [32, 32, 16, 64]
    assert len(answer["values"]) == 2


def test_arrow_returns_the_same_bytes(server: Running) -> None:
    body = stream_of(pa.table(FEATURES))
    answer = httpx.post(
        f"{server.http}/embed", content=body, headers={"content-type": ARROW}, timeout=ANSWER_S_MAX
    )
    table = read_table(answer.raise_for_status().content)
    with EmbedClient(server.http) as rest:
        expected = rest.embed(FEATURES)
    assert vectors(table["values"]).tobytes() == expected.values.tobytes()
    assert metadata_in(table)["keys"] == list(TABLE_OF)
    assert metadata_in(table)["unknown_ids"] == expected.unknown_ids


def test_result_becomes_a_keyed_tensor(server: Running) -> None:
    with EmbedClient(server.http) as rest:
        keyed = rest.embed(FEATURES).to_keyed_tensor()
    assert keyed.keys() == list(TABLE_OF)
    assert keyed["user"].shape == (3, 64)


def test_demo_if_missing_does_not_train_again(folder: Path) -> None:
    done = run_command("demo", folder / "store", "--if-missing")
    assert done.returncode == 0
    assert "has model movies already" in done.stderr
    assert not (folder / "store" / "movies" / "2").exists()


def test_publishing_the_checkpoint_equals_the_demo(folder: Path, tmp_path: Path) -> None:
    files = (folder / "demo.pt", folder / "demo.yaml", tmp_path / "again")
    done = run_warm_command("publish", *files, "--model", "movies", "--dtype", "user=int8")
    assert done.returncode == 0, done.stderr
    assert "user: 3,060 rows of 64 int8, ids by map, 203.2 KiB (561.8 KiB saved)" in done.stderr
    stores = (folder / "store", tmp_path / "again")
    one, other = (ModelStore(store).load("movies") for store in stores)
    assert [t.ids for t in one.manifest.tables] == [t.ids for t in other.manifest.tables]
    np.testing.assert_array_equal(one.tables.rows("movie"), other.tables.rows("movie"))


def test_inspect_shows_tables_and_plan(folder: Path) -> None:
    assert "movies" in run_command("inspect", folder / "store").stdout
    shown = run_command("inspect", folder / "store", "movies", "1").stdout
    assert "31,245" in shown
    assert "15,623 + 15,622 rows" in shown
    assert "row_wise" in shown


DOCUMENTS = (
    "README.md",
    "docs/rest.md",
    "docs/grpc.md",
    "docs/clients.md",
    "docs/open-inference-protocol.md",
    "docs/torchrec-predictor.md",
    "docs/store.md",
)
EXAMPLES = [block for name in DOCUMENTS for block in blocks(ROOT / name)]
CURLS = [pair for pair in pairwise(EXAMPLES) if "curl " in pair[0].text]
"""Each curl example with the block that follows. If that is JSON, it is the expected response."""
SCRIPTS = [
    pair
    for pair in pairwise([*EXAMPLES, Block(ROOT, 0, "", "")])
    if pair[0].language == "python"
    and "localhost:" in pair[0].text
    and "tritonclient" not in pair[0].text
]
"""Each Python example with the block that follows. If that is text, it is the expected output.

Excludes the examples of a client that is not installed here."""


def for_server(server: Running, text: str) -> str:
    """Returns ``text`` with the server's addresses and a longer timeout.

    A busy machine needs more time than the document's example allows.
    """
    text = text.replace("localhost:8001", server.grpc)
    text = re.sub(r"\b(timeout(?:_s)?)=0\.25\b", rf"\1={ANSWER_S_MAX}", text)
    return re.sub(r"localhost:80[01]0", server.http.removeprefix("http://"), text)


def pattern_of(answer: str) -> str:
    """Returns a pattern for a response without white space, with all fractions 0.0.

    … matches anything.
    """
    return ".*".join(map(re.escape, without_fractions(answer).split("…")))


def without_fractions(answer: str) -> str:
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", "0.0", re.sub(r"\s", "", answer))


@pytest.mark.parametrize(("block", "answer"), CURLS, ids=str)
def test_documented_curl_commands_return_the_documented_responses(
    server: Running, block: Block, answer: Block
) -> None:
    done = subprocess.run(
        shlex.split(for_server(server, block.text)), capture_output=True, check=True
    )
    if answer.language == "json":
        assert re.fullmatch(pattern_of(answer.text), without_fractions(done.stdout.decode()))
    else:
        assert json.loads(done.stdout)["model"] == "movies"


@pytest.mark.parametrize(("block", "printed"), SCRIPTS, ids=str)
def test_documented_python_examples_run_as_pasted(
    server: Running, folder: Path, block: Block, printed: Block
) -> None:
    command = [*PYTHON, "-c", for_server(server, block.text)]
    done = run_warm(command, cwd=folder, timeout=COMMAND_S_MAX)
    assert done.returncode == 0, done.stderr
    if printed.language == "text":
        assert re.fullmatch(pattern_of(printed.text), without_fractions(done.stdout))
    elif "print(" in block.text:
        assert float(done.stdout) < 1e-6


def test_every_document_has_tested_examples() -> None:
    tested = {block.path for block, _ in (*SCRIPTS, *CURLS)}
    assert tested == {ROOT / name for name in DOCUMENTS}
