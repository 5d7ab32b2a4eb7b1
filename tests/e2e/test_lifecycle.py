"""Starting on what cannot be served, and stopping under load."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from servers import free_port, run_command, running

from embedserve_client import EmbedClient, EmbedServeClientError, GrpcEmbedClient, Unavailable

DESCRIPTION = """
tables:
  - name: user
    num_embeddings: 500
    embedding_dim: 8
    feature_names: [user]
    pooling: sum
"""


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn(500, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def store(tmp_path: Path, weight: torch.Tensor) -> Path:
    """A store published from the command line, from a checkpoint with more in it."""
    checkpoint, description = tmp_path / "model.pt", tmp_path / "tables.yaml"
    torch.save(
        {"sparse.ebc.embedding_bags.user.weight": weight, "dense.0.bias": torch.zeros(4)},
        checkpoint,
    )
    description.write_text(DESCRIPTION)
    done = run_command("publish", checkpoint, description, tmp_path / "store", "--model", "m")
    assert done.returncode == 0, done.stderr
    assert "skipped, as not described: dense.0.bias" in done.stderr
    assert "published m version 1" in done.stderr
    return tmp_path / "store"


def test_a_published_checkpoint_is_served(store, weight, tmp_path) -> None:
    with running(store, tmp_path / "log", "--verify") as server, EmbedClient(server.http) as client:
        values = client.embed({"user": [[1, 2], [499]]}).values
    expected = torch.stack([weight[1] + weight[2], weight[499]]).numpy()
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)


def refused(store: Path, *arguments: object) -> str:
    """The one line with which serve refuses ``store``."""
    ports = ("--http-port", free_port(), "--grpc-port", free_port())
    done = run_command("serve", store, *ports, *arguments)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("embedserve: ")]
    return line


def test_damage_is_refused_before_ready(store) -> None:
    version = store / "m" / "1"
    tables = version / "tables.safetensors"
    data = tables.read_bytes()
    tables.write_bytes(data[:-1])
    assert "tables.safetensors" in refused(store)
    flipped = bytearray(data)
    flipped[-1] ^= 1
    tables.write_bytes(flipped)
    assert "table 'user'" in refused(store, "--verify")
    tables.write_bytes(data)
    manifest = (version / "manifest.json").read_text()
    (version / "manifest.json").write_text(
        json.dumps(json.loads(manifest) | {"format_version": 99})
    )
    assert "format_version is 99" in refused(store)
    (version / "manifest.json").write_text(manifest.replace("sum", "max"))
    assert "manifest.json" in refused(store)
    (version / "manifest.json").write_text(manifest)
    (version / "plan.json").unlink()
    assert "plan.json" in refused(store)


def test_missing_things_are_named(store, tmp_path) -> None:
    assert "nowhere" in refused(tmp_path / "nowhere")
    assert "no-such" in refused(store, "--model", "no-such")
    assert "default_model is 'other'" in refused(store, "--default-model", "other")
    assert "devices is 'tpu'" in refused(store, "--devices", "tpu")


def test_a_bad_publish_leaves_nothing(tmp_path, weight) -> None:
    checkpoint, description = tmp_path / "model.pt", tmp_path / "tables.yaml"
    description.write_text(DESCRIPTION)
    torch.save({"embedding_bags.user.weight": weight[:, :4]}, checkpoint)
    done = run_command("publish", checkpoint, description, tmp_path / "store", "--model", "m")
    assert done.returncode == 1
    assert "shape [500, 4], described is [500, 8]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "store").glob("*/*"))


def test_sigterm_under_load_loses_no_accepted_request(store, tmp_path) -> None:
    """Every request is answered right or was refused for the stop; none is cut off."""
    with running(store, tmp_path / "log") as server:
        outcomes: list[str] = []
        started = threading.Barrier(9)

        def ask(client: EmbedClient | GrpcEmbedClient) -> None:
            started.wait()
            with client:
                while True:
                    try:
                        assert client.embed({"user": [[7]] * 50}).values.shape == (50, 8)
                    except Unavailable as error:
                        outcomes.append(f"unavailable: {error}")
                        return
                    except EmbedServeClientError as error:
                        outcomes.append(f"lost: {error!r}")
                        return
                    outcomes.append("ok")

        clients = [EmbedClient(server.http) for _ in range(4)]
        clients += [GrpcEmbedClient(server.grpc) for _ in range(4)]
        threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        started.wait()
        while len(outcomes) < 500:
            assert server.process.poll() is None
        server.process.terminate()
        for thread in threads:
            thread.join(timeout=30)
        assert server.process.wait(timeout=20) == 0
    assert outcomes.count("ok") > 500
    assert [outcome for outcome in outcomes if outcome.startswith("lost")] == []


def test_settings_flag_beats_variable_beats_file(store, tmp_path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('devices = "nonsense"\nlog_level = "noise"\n')
    done = run_command("serve", store, "--config", config, "--devices", "cpu:1")
    assert "log_level is 'noise'" in done.stderr
    done = run_command(
        "serve", store, "--config", config, environment={"EMBEDSERVE_LOG_LEVEL": "loud"}
    )
    assert "log_level is 'loud'" in done.stderr


def test_docs_are_served(store, tmp_path) -> None:
    with (
        running(store, tmp_path / "log") as server,
        urllib.request.urlopen(f"{server.http}/openapi.json") as response,
    ):
        paths = json.load(response)["paths"]
    assert "/embed" in paths
    assert "/models/{model}/embed" in paths


def test_names_that_are_not_there_are_told_with_those_that_are(store, tmp_path, weight) -> None:
    assert "no model 'dlmr', there are m" in refused(store, "--model", "dlmr")
    checkpoint, description = tmp_path / "other.pt", tmp_path / "tables.yaml"
    torch.save({"ebc.embedding_bags.users.weight": weight}, checkpoint)
    done = run_command("publish", checkpoint, description, store, "--model", "m")
    assert "the tables there are users" in done.stderr
    done = run_command("demo", store, "--if-missing", "--checkpoint", tmp_path / "demo.pt")
    assert done.returncode == 1
    assert "give it without --checkpoint" in done.stderr
