"""Tests of several versions of a model: requested by name, with traffic shares, during rollouts."""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from e2e.test_following import DIM, FOLLOW, STEP, publish_next
from running_servers import ANSWER_S_MAX, Running, running
from waits import wait_until

from embedserve.commands.admin import ask_server
from embedserve.commands.running_server import ServerClient
from embedserve.commands.shadow import show_shadows
from embedserve_client import EmbedClient, GrpcEmbedClient, InvalidRequest
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub
from embedserve_store import set_alias

FEATURES: dict[str, Any] = {"user": [[7]], "item": [[7, 7]]}
IDS: dict[str, Any] = {"keys": ["user", "item"], "ids": [7, 7, 7], "lengths": [1, 2]}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a store of three versions; the alias stable is 1, canary is 2."""
    store = tmp_path_factory.mktemp("versions") / "store"
    for number in (1, 2, 3):
        publish_next(store, number)
    set_alias(store, "m", "stable", 1)
    set_alias(store, "m", "canary", 2)
    return store


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    names = ("--model", "m@stable", "--model", "m@canary")
    log = tmp_path_factory.mktemp("log") / "log"
    with running(store, log, *names, "--follow", "alias", *FOLLOW, "--workers", 2) as server:
        yield server


def rest_version(server: Running, model: str = "", routing_key: str = "", **body: Any) -> int:
    """Sends a request over REST, checks its rows and returns the version that responded."""
    path = f"/models/{model}/embed" if model else "/embed"
    headers = {"X-Routing-Key": routing_key} if routing_key else {}
    sent = {"features": FEATURES} | body
    answer = httpx.post(
        server.http + path, json=sent, headers=headers, verify=False, timeout=ANSWER_S_MAX
    )
    answer.raise_for_status()
    message = answer.json()
    assert message["values"] == [[message["version"] * STEP + 7.0] * (3 * DIM)]
    return int(message["version"])


def wait_for_all(server: Running, model: str, number: int) -> None:
    """Waits until version ``number`` responds over each of 20 connections, so in all workers.

    The supervisor notifies one worker after another.
    """

    def is_everywhere() -> bool:
        try:
            return {rest_version(server, model) for _ in range(20)} == {number}
        except httpx.HTTPStatusError as error:
            if model and error.response.status_code == httpx.codes.NOT_FOUND:
                return False  # a worker does not know the name yet
            raise

    wait_until(is_everywhere)


def grpc_version(stub: EmbeddingServiceStub, routing_key: str = "", **fields: Any) -> int:
    """Sends a request over gRPC, checks its rows and returns the version that responded."""
    metadata = [("x-routing-key", routing_key)] if routing_key else []
    answer = stub.Embed(pb.EmbedRequest(**IDS, **fields), metadata=metadata)
    values = np.frombuffer(answer.values, "<f4")
    assert np.array_equal(values, np.full(3 * DIM, answer.version * STEP + 7, np.float32))
    return int(answer.version)


@pytest.fixture
def stub(server: Running) -> Iterator[EmbeddingServiceStub]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield EmbeddingServiceStub(channel)


def test_request_selects_its_version_by_alias_or_number(
    server: Running, stub: EmbeddingServiceStub
) -> None:
    for name, number in (("stable", 1), ("canary", 2), ("1", 1), ("2", 2)):
        assert rest_version(server, f"m@{name}") == number
        assert rest_version(server, "m", version=name) == number
        assert rest_version(server, version=name) == number
        assert grpc_version(stub, model="m", version=name) == number
        assert grpc_version(stub, model=f"m@{name}") == number
        assert grpc_version(stub, version=name) == number
    assert rest_version(server, version=2) == 2
    assert rest_version(server) == rest_version(server, "m") == grpc_version(stub) == 1


def test_version_that_is_not_served_is_rejected_with_the_served_versions(
    server: Running, stub: EmbeddingServiceStub
) -> None:
    answer = httpx.post(
        f"{server.http}/embed", json={"features": FEATURES, "version": 3}, verify=False
    )
    assert answer.status_code == 404
    message = "version is 3: the versions of m are 1 (stable), 2 (canary)"
    assert answer.json()["error"] == {"code": "NOT_FOUND", "message": message, "field": "version"}
    with pytest.raises(grpc.RpcError) as caught:
        grpc_version(stub, model="m", version="3")
    error: Any = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, message)
    with pytest.raises(grpc.RpcError, match="the model 'm@1' says which already"):
        grpc_version(stub, model="m@1", version="2")


def test_model_list_describes_both_versions(server: Running, stub: EmbeddingServiceStub) -> None:
    models = server.models()
    assert [(one["version"], one["alias"]) for one in models] == [(1, "stable"), (2, "canary")]
    messages = stub.ListModels(pb.ListModelsRequest()).models
    assert [(one.version, one.alias) for one in messages] == [(1, "stable"), (2, "canary")]
    for name, version in (("m@canary", 2), ("m", 1)):
        assert server.get(f"/models/{name}").json()["version"] == version


def test_canary_receives_its_share_until_its_alias_is_removed(
    server: Running, store: Path, stub: EmbeddingServiceStub
) -> None:
    set_alias(store, "m", "canary", 3, share=30)
    wait_for_all(server, "m@canary", 3)
    keys = [f"user-{i}" for i in range(60)]
    first = [rest_version(server, routing_key=key) for key in keys]
    assert set(first) == {1, 3}
    assert [grpc_version(stub, routing_key=key) for key in keys] == first
    with (
        EmbedClient(server.http, timeout_s=ANSWER_S_MAX) as rest,
        GrpcEmbedClient(server.grpc, timeout_s=ANSWER_S_MAX) as grpc_client,
    ):
        for client in (rest, grpc_client):
            versions = [client.embed(FEATURES, routing_key=key).version for key in keys[:20]]
            assert versions == first[:20]
            with pytest.raises(InvalidRequest, match=r"^routing_key: "):
                client.embed(FEATURES, routing_key="a\nb")
    counts = Counter(grpc_version(stub) for _ in range(400))
    assert set(counts) == {1, 3}
    assert 60 < counts[3] < 180
    metrics = server.metrics()
    for alias, version in (("stable", 1), ("canary", 3)):
        labels = f'alias="{alias}",model="m",version="{version}"'
        assert f"embedserve_queue_wait_seconds_count{{{labels}}}" in metrics
    assert 'version="2"' not in metrics
    set_alias(store, "m", "canary", None)  # its version still responds by name
    wait_until(lambda: {rest_version(server) for _ in range(50)} == {1})
    assert rest_version(server, "m@canary") == 3
    set_alias(store, "m", "canary", 2)
    wait_for_all(server, "m@canary", 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_first_requests_follow_the_traffic_shares(
    tmp_path: Path, store: Path, workers: int
) -> None:
    """Checks the shares read at the start; the next poll of the store is an hour away."""
    names = ("--model", "m@stable", "--model", "m@first")
    set_alias(store, "m", "first", 3, share=100)
    one_poll_an_hour = ("--follow", "alias", "--follow-s", 3600, "--workers", workers)
    with running(store, tmp_path / "log", *names, *one_poll_an_hour) as server:
        assert [rest_version(server) for _ in range(20)] == [3] * 20


def test_shadow_version_is_compared_with_the_served_version(
    server: Running, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    show_shadows(ServerClient(server.http))
    assert "no version runs in the shadow of another" in capfd.readouterr().out
    set_alias(store, "m", "canary", 2, shadow=100)

    shown = ""

    def are_compared() -> bool:
        """Returns whether two batches are compared.

        A worker that has not compared any shows none, or no shadow.
        """
        nonlocal shown
        assert rest_version(server) == 1
        show_shadows(ServerClient(server.http))
        shown = capfd.readouterr().out
        found = re.search(r"canary version 2 against 1: ([\d,]+) batches compared", shown)
        return found is not None and found[1] not in ("0", "1")

    wait_until(are_compared)
    table, key, _, empty, *figures = shown.splitlines()[2].split()
    # The shadow returns 2007 everywhere, the served version 1007: same direction, relative error
    # 0.993.
    assert (table, key, empty) == ("user", "user", "0")
    assert figures == ["1.000000", "9.93e-01", "none"]
    set_alias(store, "m", "canary", 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_sighup_makes_the_server_poll_the_store(tmp_path: Path, workers: int) -> None:
    store = tmp_path / "store"
    publish_next(store, 1)
    with running(store, tmp_path / "log", "--workers", workers) as server:
        publish_next(store, 2)
        assert rest_version(server) == 1
        os.kill(server.process.pid, signal.SIGHUP)
        wait_until(lambda: rest_version(server) == 2)
        # The supervisor logs it after it has notified the workers.
        wait_until(lambda: "m: switched to version 2 (before: 1)" in server.log.read_text())


@pytest.mark.parametrize("workers", [1, 2])
def test_administrator_loads_and_unloads_versions(
    tmp_path: Path, store: Path, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", "m@1", "--workers", workers)
    with running(store, tmp_path / "log", *options, has_management_port=True) as server:
        management = ServerClient(server.management)
        ask_server(management, "load", "m@3")
        assert "m@3 is now served by version 3" in capfd.readouterr().err
        wait_for_all(server, "m@3", 3)
        assert {rest_version(server) for _ in range(20)} == {1}
        for model, problem in (("m@9", "version 9 does not exist"), ("x", "there is no model 'x'")):
            with pytest.raises(ConnectionError, match=problem):
                ask_server(management, "load", model)
        ask_server(management, "unload", "m@1")
        wait_for_all(server, "", 3)
        with pytest.raises(ConnectionError, match="nothing else is served"):
            ask_server(management, "unload", "m@3")
        ask_server(management, "reload", "")
        if workers > 1:  # a new worker has the same versions
            os.kill(server.children()[0], signal.SIGKILL)
            wait_until(lambda: "is ready again" in server.log.read_text())
            assert {rest_version(server) for _ in range(40)} == {3}
        body = json.dumps({"model": "m@1"})
        for headers in ({"Content-Type": "text/plain"}, {}):
            answer = httpx.post(
                f"{management.url}/admin/load", content=body, headers=headers, verify=False
            )
            assert answer.status_code == 415
        for port in (server.http, f"http://{server.grpc}"):
            answer = httpx.post(
                f"{port}/admin/load", json={"model": "m@1"}, verify=False, timeout=ANSWER_S_MAX
            )
            assert answer.status_code == 404
        with pytest.raises(ConnectionError, match="ask the port of --management-port"):
            ask_server(ServerClient(server.http), "load", "m@1")


def test_worker_that_starts_later_has_the_default_model_of_the_others(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish_next(store, 1)
    publish_next(store, 1, model="n")
    options = ("--model", "m", "--workers", 2)
    with running(store, tmp_path / "log", *options, has_management_port=True) as server:
        ask_server(ServerClient(server.management), "load", "n")
        os.kill(server.children()[0], signal.SIGKILL)
        wait_until(lambda: "is ready again" in server.log.read_text())
        assert {rest_version(server) for _ in range(40)} == {1}
