"""Tests of models in parts behind a router: responses equal those of one server of whole tables."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from certificates import Authority
from e2e.parts_cluster import (
    BOTH_PARTS,
    DIM,
    PARTS,
    ROWS,
    STEP,
    Cluster,
    Load,
    cluster,
    post_embed,
    publish_next,
    replicas,
    shard_metrics,
)
from pooled import collection
from running_servers import Running, run_warm_command, running
from torchrec import PoolingType
from waits import wait_until

from embedserve_client import EmbedClient, EmbedResult, GrpcEmbedClient
from embedserve_store import TableSpec, publish
from embedserve_store.format.id_rule import IdRule


def publish_models(store: Path) -> None:
    """Publishes models of every kind: shared features, means, weights, strings, unpooled."""
    torch.manual_seed(1)
    tables = [
        ("movie", 1001, 64, ["history", "candidate"], PoolingType.MEAN),
        ("genre", 3, 16, ["genres"], PoolingType.SUM),
        ("recent", 977, 8, ["history"], PoolingType.SUM),
    ]
    publish(collection(tables), store, model="pooled", hosts=PARTS)
    # Its lookups are traced. Each process would compile those of a feature of two tables.
    publish(collection(tables[:2]), store, model="int8", dtype="int8", hosts=PARTS)
    weights = {"embeddings.t_user.weight": torch.randn(400, 8)}
    spec = [TableSpec("t_user", 400, 8, ("user",), "none", "float32")]
    publish(weights, store, model="unpooled", tables=spec, hosts=PARTS)
    named = {name: torch.randn(200, 8) for name in ("word", "user")}
    publish(
        {f"embedding_bags.{name}.weight": rows for name, rows in named.items()},
        store,
        model="named",
        tables=[TableSpec(name, 200, 8, (name,), "sum", "float32") for name in named],
        vocabularies={
            "word": [f"w{row}" for row in range(200)],
            "user": [10**12 + row for row in range(200)],
        },
        ids={"word": IdRule("map", id_type="string"), "user": IdRule("map")},
        hosts=PARTS,
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yields the shards of models of every kind."""
    folder = tmp_path_factory.mktemp("parts")
    publish_models(folder / "store")
    with cluster(folder / "store", folder) as one:
        one.start_shards()
        yield one


@pytest.fixture(scope="module")
def router_and_whole_server(shards: Cluster) -> tuple[Running, Running]:
    """Returns a router, and a server of whole tables over the same store.

    The server has all rows on one rank, so that its lookups need no compilation.
    """
    log = shards.folder / "whole.log"
    whole = shards.stack.enter_context(running(shards.store, log, "--devices", "cpu:1"))
    return shards.start_router(), whole


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("pooled", {"history": [[1, 2, 900], []], "candidate": [[0], [1000]], "genres": [[2], []]}),
    ("pooled", {"history": [[500, 501, 500]]}),
    ("pooled", {"genres": [[], [], [0, 1, 2, 2]]}),
    ("int8", {"history": [list(range(0, 900, 3))], "candidate": [[7, 7, 999]], "genres": [[0]]}),
    (
        "named",
        {
            "word": [["w0", "w199", "w0"], ["w100"]],
            "user": [[10**12 + 199], [10**12, 10**12 + 120]],
        },
    ),
    ("unpooled", {"user": [[399, 0, 200, 199, 0], [], [201]]}),
]


@pytest.mark.parametrize(("model", "features"), REQUESTS)
@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_router_results_equal_those_of_one_server(
    router_and_whole_server: tuple[Running, Running],
    protocol: str,
    model: str,
    features: dict[str, Any],
) -> None:
    answers = []
    for server in router_and_whole_server:
        with (
            EmbedClient(server.http) if protocol == "rest" else GrpcEmbedClient(server.grpc)
        ) as client:
            answers.append(client.embed(features, model=model))
    routed, whole = answers
    assert (routed.model, routed.version, routed.keys) == (whole.model, whole.version, whole.keys)
    for key in whole.keys:
        found, expected = values_of(routed, key), values_of(whole, key)
        assert found.shape == expected.shape
        largest = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * largest)


def test_partial_sums_are_rounded_to_the_partial_dtype(
    shards: Cluster, router_and_whole_server: tuple[Running, Running]
) -> None:
    _, whole = router_and_whole_server
    router = shards.start_router("--partial-dtype", "float16")
    for model, features in (REQUESTS[0], REQUESTS[-1]):
        with GrpcEmbedClient(router.grpc) as routed, GrpcEmbedClient(whole.grpc) as exact:
            answer = routed.embed(features, model=model)
            expected = exact.embed(features, model=model)
        errors = {
            key: np.abs(values_of(answer, key) - values_of(expected, key)).max()
            / np.abs(values_of(expected, key)).max()
            for key in expected.keys
        }
        assert all(error < 2.0**-10 for error in errors.values()), errors
        assert any(error > 1e-6 for error in errors.values()), errors


def values_of(result: EmbedResult, key: str) -> np.ndarray:
    values = result[key]
    return values if isinstance(values, np.ndarray) else values.values


INVALID_BODIES = [
    {"features": {"history": [[1001]]}},
    {"features": {"nothing": [[1]]}},
    {"features": {"history": [[1]], "genres": [[1], [2]]}},
    {"features": {"history": [[1]]}, "model": "other"},
]


@pytest.mark.parametrize("body", INVALID_BODIES)
def test_invalid_requests_get_the_errors_of_one_server(
    router_and_whole_server: tuple[Running, Running], body: dict[str, Any]
) -> None:
    responses = [
        httpx.post(f"{server.http}/models/pooled/embed", json=body, timeout=60)
        for server in router_and_whole_server
    ]
    routed, whole = ((one.status_code, one.json()["error"]) for one in responses)
    assert routed == whole
    assert routed[0] in (400, 404)


def test_model_list_reports_parts_and_replicas(
    router_and_whole_server: tuple[Running, Running],
) -> None:
    router, whole = router_and_whole_server
    fingerprints = []
    for server in router_and_whole_server:
        models = server.models()
        assert {(one["part"], one["parts"]) for one in models} == {(0, 0)}
        fingerprints.append([one["fingerprint"] for one in models])
    assert fingerprints[0] == fingerprints[1]
    models = router.models()
    assert {one["lookup"] for one in models} == {"parts"}
    parts = [{"part": part, "replicas": 1, "why": ""} for part in range(PARTS)]
    assert [one["shards"] for one in models] == [parts] * len(models)
    models = whole.models()
    assert not any("shards" in one for one in models)
    assert shard_metrics(whole) == {}


def test_router_workers_share_counters_and_switch_versions_together(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish_next(store, 1)
    follow = ("--follow", "latest", "--follow-s", 0.1)
    with cluster(store, tmp_path) as one:
        one.start_shards(*follow)
        router = one.start_router("--workers", 2, *follow)
        for number in range(20):
            assert post_embed(router, user=[[number]]).status_code == 200
        wait_until(lambda: shard_metrics(router)["calls 0 ok"] >= 20)
        metrics = shard_metrics(router)
        assert (metrics["calls 0 ok"], metrics["calls 1 ok"]) == (20, 0)
        assert metrics["seconds_count 0"] == 20
        assert replicas(router) == [1, 1]
        publish_next(store, 2)
        wait_until(lambda: serving_versions(router) == [2], lambda: serving_versions(router))


def serving_versions(router: Running) -> list[int]:
    models = router.models()
    return [one["version"] for one in models]


def test_router_waits_for_shards_with_its_fingerprint_at_known_addresses(tmp_path: Path) -> None:
    """Checks a part whose shard starts later, at its known address, and another with a shard of
    another store, which has a version of the same name and number."""
    store, other = tmp_path / "store", tmp_path / "other"
    publish_next(store, 1)
    publish(
        {"embedding_bags.user.weight": torch.zeros(ROWS, DIM)},
        other,
        model="m",
        tables=[TableSpec("user", ROWS, DIM, ("user",), "sum", "float32")],
        hosts=PARTS,
    )
    with cluster(store, tmp_path) as one, cluster(other, tmp_path / "other") as other_cluster:
        strange = other_cluster.start_shard(1)
        late = f"127.0.0.1:{one.ports_of(0)[1]}"
        one.addresses.write_text(json.dumps({0: [late], 1: [strange.grpc]}))
        wait_for_router = one.begin_router("cannot connect", "with fingerprint")
        one.start_shard(0)
        one.start_shard(1)
        one.write_addresses()
        response = post_embed(wait_for_router(), user=[BOTH_PARTS])
        assert response.json()["values"] == [[2 * STEP + 100.0] * DIM]


def test_request_too_large_for_a_shard_is_not_reported_as_overload(tmp_path: Path) -> None:
    """Checks the error of a request that only the shards' limits reject: no retry would help."""
    store = tmp_path / "store"
    publish_next(store, 1)
    limits = ("--request-examples-max", 1000, "--body-bytes-max", 100_000)
    with cluster(store, tmp_path) as one:
        one.start_shards(*limits)
        router = one.start_router()
        for bags, words in (
            ([[3]] * 1001, "the batch has 1001 examples, the limit is 1000 (--request-examples-"),
            ([[3] * 20_000], "bytes, the limit is 100000 (--body-bytes-max)"),
        ):
            response = post_embed(router, user=bags)
            assert response.status_code == 413
            assert "retry-after" not in response.headers
            message = response.json()["error"]["message"]
            assert "part 0 of 2 of 'm' version 1 rejects a request of this size: " in message
            assert words in message
        metrics = shard_metrics(router)
        assert metrics["calls 0 error"] == 2
        assert "calls 0 overloaded" not in metrics
        response = post_embed(router, user=[[3]] * 1000)
        assert response.json()["values"] == [[STEP + 3.0] * DIM] * 1000


def test_shards_authenticate_their_router_by_certificate_and_token(tmp_path: Path) -> None:
    """Checks that the token can be replaced under load, as docs/security.md describes."""
    store = tmp_path / "store"
    publish_next(store, 1)
    authority = Authority()
    (tmp_path / "ca.pem").write_bytes(authority.root)
    certificate, key = authority.sign("shard").write(tmp_path, "shard")
    router_certificate, router_key = authority.sign("router").write(tmp_path, "router")
    tokens, token = tmp_path / "tokens", tmp_path / "token"
    token.write_text("a-token-of-the-router\n")
    hashes = [
        hashlib.sha256(text).hexdigest() for text in (b"a-token-of-the-router", b"the-next-token")
    ]

    def allow(*allowed: str) -> None:
        written = tokens.with_suffix(".new")
        written.write_text(json.dumps({"name": "router", "sha256": allowed}))
        written.replace(tokens)

    allow(hashes[0])
    shard_tls_options = ("--tls-cert", certificate, "--tls-key", key, "--tls-client-ca")
    with cluster(store, tmp_path) as one:
        for part in range(PARTS):
            options = (*shard_tls_options, tmp_path / "ca.pem", "--tokens", tokens)
            log = tmp_path / f"shard-{part}.log"
            server = running(
                *(store, log, "--part", f"{part}/{PARTS}", *options), has_management_port=True
            )
            one.shards[part, 0] = one.stack.enter_context(server)
        one.write_addresses()
        tls = (
            "--shard-ca",
            tmp_path / "ca.pem",
            "--shard-cert",
            router_certificate,
            "--shard-key",
            router_key,
        )
        router = one.start_router(*tls, "--shard-token", token)

        def shards_have_reloaded_tokens(times: int) -> bool:
            logs = [shard.log.read_text() for shard in one.shards.values()]
            return all(log.count("tokens: read again") == times for log in logs)

        with Load(router, BOTH_PARTS) as load:
            load.wait_for_more()
            allow(*hashes)
            load.wait_for(lambda: shards_have_reloaded_tokens(1))
            token.write_text("the-next-token\n")
            words = "left m@1: its connection was replaced"
            load.wait_for(lambda: router.log.read_text().count(words) == PARTS)
            allow(hashes[1])
            load.wait_for(lambda: shards_have_reloaded_tokens(2))
            load.wait_for_more()
        assert load.failed == load.wrong == []


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("settings") / "store"
    publish_next(store, 1)
    return store


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--part", "2/2"), "part is 2/2"),
        (("--part", "0/3"), "the version has 2 parts"),
        (("--part", "x"), "part is 'x'"),
        (("--part", "0/2", "--shards", "file:x"), "a server is a shard"),
        (("--part", "0/2", "--deltas", "follow"), "by whole versions only"),
        (("--shards", "nowhere"), "nowhere"),
        (("--shards", "file:/nowhere.json"), "/nowhere.json"),
        (("--shards", "file:x", "--tables", "resident"), "the rows are in the shards"),
        (("--shards", "file:x", "--shard-ca", "/nowhere.pem"), "/nowhere.pem"),
        (("--shards", "file:x", "--shard-cert", "x"), "come together"),
        (("--shard-token", "x"), "this server is no router"),
        (("--partial-dtype", "float16"), "this server is no router"),
        (("--local-bytes", "1"), "local_bytes is 1, but this server is no router"),
        (("--row-cache", "1"), "row_cache is 1, but this server is no router"),
        (("--shards", "file:x", "--partial-dtype", "int8"), "partial_dtype is 'int8'"),
        (("--on-missing", "zeros"), "this server is no router"),
        (
            ("--shards", "file:x", "--on-missing", "usr=zeros"),
            "names table 'usr', but 'm' has user",
        ),
    ],
)
def test_invalid_settings_of_parts_are_rejected(
    store: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = run_warm_command("serve", store, "--http-port", 0, "--grpc-port", 0, *arguments)
    assert done.returncode != 0
    assert words in done.stderr
