"""Tests of a server that starts on invalid stores, waits for a model, or stops under load."""

import json
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from running_servers import (
    ANSWER_S_MAX,
    READY_S_MAX,
    STOPPED_S_MAX,
    Running,
    command,
    free_port,
    run_commands,
    run_warm_command,
    running,
    started,
    status,
)
from waits import wait_until
from writable import writable

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


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, weight: torch.Tensor) -> Path:
    """Returns a store published by the command line, from a checkpoint with further tensors."""
    folder = tmp_path_factory.mktemp("lifecycle")
    checkpoint, description = folder / "model.pt", folder / "tables.yaml"
    torch.save(
        {"sparse.ebc.embedding_bags.user.weight": weight, "dense.0.bias": torch.zeros(4)},
        checkpoint,
    )
    description.write_text(DESCRIPTION)
    names = (checkpoint, description, folder / "store")
    done = run_warm_command("publish", *names, "--model", "m")
    assert done.returncode == 0, done.stderr
    assert "skipped, as not described: dense.0.bias" in done.stderr
    assert "published m version 1" in done.stderr
    return folder / "store"


@pytest.fixture
def store(published: Path, tmp_path: Path) -> Path:
    """Returns a copy of the store for one test."""
    return shutil.copytree(published, tmp_path / "store")


@pytest.fixture(scope="module")
def server(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(published, tmp_path_factory.mktemp("log") / "log", "--verify") as server:
        yield server


def test_published_checkpoint_is_served(server: Running, weight: torch.Tensor) -> None:
    with EmbedClient(server.http) as client:
        values = client.embed({"user": [[1, 2], [499]]}).values
    expected = torch.stack([weight[1] + weight[2], weight[499]]).numpy()
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)


def test_integers_of_more_than_640_digits_are_not_parsed(server: Running) -> None:
    """Checks the process: Python parses 4300 digits by default, in a quadratic time."""
    body = b'{"features": {"user": [[%b]]}}' % (b"1" * 641)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{server.http}/embed", body, timeout=ANSWER_S_MAX)
    with error.value:
        assert error.value.code == 400
        assert b"body has an integer of more than 640 digits" in error.value.read()


@contextmanager
def waiting_server(log: Path, *arguments: object, is_warm: bool) -> Iterator[Running]:
    """Runs a server that waits for a model in its store."""
    http_port, grpc_port = free_port(), free_port()
    ports = ("--http-port", http_port, "--grpc-port", grpc_port)
    words = command("serve", *arguments, "--wait", *ports)
    with started(words, log, is_warm=is_warm) as process:
        server = Running(process, f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", log)

        def is_waiting() -> bool:
            assert process.poll() is None, log.read_text()
            return "waiting for what is to be served" in log.read_text()

        try:
            wait_until(is_waiting)
            wait_until(lambda: status(server.http + "/health/live") == 200)
            yield server
        finally:
            process.kill()


@pytest.mark.parametrize("workers", [1, 2])
def test_waiting_server_is_live_but_not_ready(
    published: Path, weight: torch.Tensor, tmp_path: Path, workers: int
) -> None:
    """Checks liveness and readiness while a server waits.

    The server with two workers starts as from a shell.
    """
    store = tmp_path / "store"
    store.mkdir()
    uds = tmp_path / "http.sock"
    options = ("--model", "m", "--workers", workers, "--http-uds", uds)
    with waiting_server(tmp_path / "log", store, *options, is_warm=workers == 1) as server:
        server.process.send_signal(signal.SIGHUP)  # reloads (systemctl reload), does not end
        assert status(server.http + "/health/ready") == 503
        with (
            EmbedClient(f"unix:{uds}") as client,
            pytest.raises(Unavailable, match="the models are being loaded"),
        ):
            client.embed({"user": [[1]]}, model="m")
        assert status(server.http + "/models/m/embed", b'{"features": {"user": [[1]]}}') == 503
        assert status(server.http + "/models") == 503
        assert "embedserve_workers 0.0" in server.metrics()
        host, _, port = server.grpc.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
        http_target = server.http.removeprefix("http://")  # the HTTP port takes gRPC, too
        with grpc.insecure_channel(http_target) as channel:
            health = HealthStub(channel).Check(HealthCheckRequest(), timeout=60)
            assert health.status == HealthCheckResponse.NOT_SERVING
            with (
                GrpcEmbedClient(http_target) as client,
                pytest.raises(Unavailable, match="the models are being loaded"),
            ):
                client.embed({"user": [[1]]}, model="m")
        if workers == 1:  # the rest is the same for all
            shutil.copytree(published / "m", store / ".m")
            (store / ".m").rename(store / "m")
            wait_until(lambda: status(server.http + "/health/ready") == 200)
            for address in (server.http, f"unix:{uds}"):
                with EmbedClient(address) as client:
                    values = client.embed({"user": [[1, 2]]}).values
                expected = (weight[1] + weight[2])[None].numpy()
                np.testing.assert_allclose(values, expected, rtol=1e-6)
            with GrpcEmbedClient(server.grpc) as grpc_client:
                assert np.array_equal(grpc_client.embed({"user": [[1, 2]]}).values, values)
            assert f"REST {server.http} and unix:{uds} (docs" in server.log.read_text()
        server.process.terminate()
        assert server.process.wait(timeout=STOPPED_S_MAX) == 0
        assert status(server.http + "/health/live") == 0
        assert not uds.exists()


def rejection_messages(*commands: tuple[object, ...]) -> list[str]:
    """Returns the one-line message with which ``serve`` rejects each store and its options."""
    ended = run_commands(
        *(
            ("serve", store, "--http-port", 0, "--grpc-port", 0, *options)
            for store, *options in commands
        )
    )
    return [rejection_message(done) for done in ended]


def rejection_message(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("embedserve: ")]
    return line


def test_damaged_store_is_rejected_before_readiness(published: Path, tmp_path: Path) -> None:
    def damaged(kind: str, name: str, change: Callable[[bytes], bytes]) -> Path:
        store = writable(shutil.copytree(published, tmp_path / kind))
        path = store / "m" / "1" / name
        path.write_bytes(change(path.read_bytes()))
        return store

    def another_format(manifest: bytes) -> bytes:
        return json.dumps(json.loads(manifest) | {"format_version": 99}).encode()

    without_plan = damaged("unplanned", "plan.json", lambda data: data)
    (without_plan / "m" / "1" / "plan.json").unlink()
    cut, flipped, newer, changed, unplanned = rejection_messages(
        (damaged("cut", "tables.safetensors", lambda data: data[:-1]),),
        (
            damaged(
                "flipped", "tables.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])
            ),
            "--verify",
        ),
        (damaged("newer", "manifest.json", another_format),),
        (damaged("changed", "manifest.json", lambda data: data.replace(b"sum", b"max")),),
        (without_plan,),
    )
    assert "tables.safetensors" in cut
    assert "table 'user'" in flipped
    assert "format_version is 99" in newer
    assert "manifest.json" in changed
    assert "plan.json" in unplanned


def test_missing_stores_models_and_devices_are_named(store: Path, tmp_path: Path) -> None:
    nowhere, model, default_model, misspelt, devices = rejection_messages(
        (tmp_path / "nowhere",),
        (store, "--model", "no-such"),
        (store, "--default-model", "other"),
        (store, "--model", "dlmr"),
        (store, "--devices", "tpu"),
    )
    assert "nowhere" in nowhere
    assert "no-such" in model
    assert "there is no model 'other'; models are m" in default_model
    assert "there is no model 'dlmr'; models are m" in misspelt
    assert "devices is 'tpu'" in devices


def test_failed_publish_leaves_no_files(tmp_path: Path, weight: torch.Tensor) -> None:
    checkpoint, description = tmp_path / "model.pt", tmp_path / "tables.yaml"
    description.write_text(DESCRIPTION)
    torch.save({"embedding_bags.user.weight": weight[:, :4]}, checkpoint)
    done = run_warm_command("publish", checkpoint, description, tmp_path / "store", "--model", "m")
    assert done.returncode == 1
    assert "shape [500, 4], described is [500, 8]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "store").glob("*/*"))


@pytest.mark.parametrize("grpc_server", ["native", "grpcio"])
def test_sigterm_under_load_loses_no_accepted_request(
    store: Path, tmp_path: Path, grpc_server: str
) -> None:
    """Checks that every request gets a correct response or is rejected because of the stop."""
    # A busy machine may delay clients whose requests the server has begun to read.
    options = ("--grpc-server", grpc_server, "--drain-s", ANSWER_S_MAX)
    with running(store, tmp_path / "log", *options) as server:
        outcomes: list[str] = []
        started, enough = threading.Barrier(9), threading.Event()

        def send_requests(client: EmbedClient | GrpcEmbedClient) -> None:
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
                    if len(outcomes) > 500:
                        enough.set()

        clients = [
            *(EmbedClient(server.http, timeout_s=ANSWER_S_MAX) for _ in range(4)),
            *(GrpcEmbedClient(server.grpc, timeout_s=ANSWER_S_MAX) for _ in range(4)),
        ]
        threads = [threading.Thread(target=send_requests, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        started.wait()
        assert enough.wait(timeout=READY_S_MAX)
        server.process.terminate()
        for thread in threads:
            thread.join(timeout=READY_S_MAX)
        assert server.process.wait(timeout=2 * ANSWER_S_MAX) == 0
    assert outcomes.count("ok") > 500
    assert [outcome for outcome in outcomes if outcome.startswith("lost")] == []


def test_flag_overrides_variable_and_variable_overrides_config_file(
    store: Path, tmp_path: Path
) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('devices = "nonsense"\nlog_level = "noise"\n')
    done = run_warm_command("serve", store, "--config", config, "--devices", "cpu:1")
    assert "log_level is 'noise'" in done.stderr
    done = run_warm_command(
        "serve", store, "--config", config, environment={"EMBEDSERVE_LOG_LEVEL": "loud"}
    )
    assert "log_level is 'loud'" in done.stderr


def test_openapi_document_is_served(server: Running) -> None:
    with urllib.request.urlopen(f"{server.http}/openapi.json") as response:
        paths = json.load(response)["paths"]
    assert "/embed" in paths
    assert "/models/{model}/embed" in paths


def test_unknown_tables_are_reported_with_the_existing_tables(
    store: Path, tmp_path: Path, weight: torch.Tensor
) -> None:
    checkpoint, description = tmp_path / "other.pt", tmp_path / "tables.yaml"
    description.write_text(DESCRIPTION)
    torch.save({"ebc.embedding_bags.users.weight": weight}, checkpoint)
    done = run_warm_command("publish", checkpoint, description, store, "--model", "m")
    assert "the tables there are users" in done.stderr
    done = run_warm_command("demo", store, "--if-missing", "--checkpoint", tmp_path / "demo.pt")
    assert done.returncode == 1
    assert "give it without --checkpoint" in done.stderr
