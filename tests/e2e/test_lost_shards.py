"""Tests of a router that responds while versions change and replicas are lost."""

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

from e2e.parts_cluster import (
    BOTH_PARTS,
    DIM,
    PARTS,
    STEP,
    Load,
    cluster,
    post_embed,
    publish_next,
    replicas,
    shard_metrics,
)
from running_servers import Running
from stalling_proxy import stalling_proxy
from waits import wait_until

ANY_BYTES = 1 << 62
SHORT_CALL_TIMEOUT = ("--shard-timeout-ms", 2500)
"""Timeout of calls, shorter than the time after which a silent connection is lost and its calls
repeated."""
HANGS_MAX = 30
"""Attempts to hang a replica during a call."""


def test_rollout_under_load_never_mixes_versions_in_a_response(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish_next(store, 1)
    follow = ("--follow", "latest", "--follow-s", "0.2")
    with cluster(store, tmp_path) as one:
        one.start_shards(*follow, "--versions-held", 4)
        router = one.start_router(*follow)
        with Load(router, BOTH_PARTS) as load:
            for number in (2, 3, 4):
                load.wait_for_more()
                publish_next(store, number)
                load.wait_for(lambda number=number: load.answers.get(number, 0) > 20)  # type: ignore[misc]
        assert load.wrong == []
        assert load.failed == []
        assert list(load.answers) == [1, 2, 3, 4]
        held = one.shards[0, 0].models()
        assert {one["version"] for one in held} == {1, 2, 3, 4}


def test_metrics_show_which_part_lacks_the_next_version(tmp_path: Path) -> None:
    """Checks the metrics of a router of one process, and of one with workers."""
    store = tmp_path / "store"
    publish_next(store, 1)
    follow = ("--follow", "latest", "--follow-s", "0.2")
    with cluster(store, tmp_path) as one:
        one.start_shard(0, 0, *follow)
        one.start_shard(1, 0)  # does not follow
        one.write_addresses()
        routers = [one.start_router(*follow, "--workers", workers) for workers in (1, 2)]
        for router in routers:
            assert replicas(router) == [1, 1]
        publish_next(store, 2)
        for router in routers:
            wait_until(partial(has_next_version, router), router.metrics)
            metrics = shard_metrics(router)
            assert metrics["replicas 1 m next 2"] == 0
            assert [metrics[f"replicas {part} m served 1"] for part in range(PARTS)] == [1, 1]


def has_next_version(router: Running) -> bool:
    """Returns whether part 0 has a replica for version 2, which is not served yet."""
    return shard_metrics(router).get("replicas 0 m next 2") == 1


def test_killed_hung_or_vanished_replica_fails_no_request(tmp_path: Path) -> None:
    """Checks three faults. Nothing arrives from a vanished host, not even the end of its
    connections."""
    store = tmp_path / "store"
    publish_next(store, 1)
    with cluster(store, tmp_path) as one:
        one.start_shards(replicas=2)
        with stalling_proxy(one.ports_of(1, 1)[1], ANY_BYTES) as proxy:
            one.shards[1, 1] = replace(one.shards[1, 1], grpc=f"127.0.0.1:{proxy.port}")
            one.write_addresses()
            router = one.start_router(*SHORT_CALL_TIMEOUT)
            with Load(router, BOTH_PARTS) as load:
                load.wait_for(lambda: replicas(router) == [2, 2])
                load.wait_for_more()
                before = shard_metrics(router)
                assert min(before["calls 0 ok"], before["calls 1 ok"]) >= 50
                assert min(before["bytes 0 sent"], before["bytes 1 received"]) > 0
                one.shards[0, 0].process.kill()
                load.wait_for(lambda: replicas(router) == [1, 2])
                load.wait_for_more()
                one.start_shard(0, 0)
                load.wait_for(lambda: replicas(router) == [2, 2])
                before = shard_metrics(router)
                hang(one.shards[1, 0], router, load)
                assert shard_metrics(router)["calls 1 ok"] >= before["calls 1 ok"] + 50
                one.shards[0, 1].process.kill()  # the restarted replica takes over
                load.wait_for_more()
                load.wait_for(lambda: replicas(router) == [1, 2])
                proxy.stall()
                load.wait_for(lambda: replicas(router) == [1, 1])
                load.wait_for_more()
                proxy.released.set()
                load.wait_for(lambda: replicas(router) == [1, 2])
                load.wait_for_more()
            assert proxy.stalled.is_set()
        assert load.wrong == []
        assert load.failed == []


def hang(shard: Running, router: Running, load: Load) -> None:
    """Stops a replica of part 1 during a call, and lets it continue.

    A replica that leaves a poll unanswered counts as busier, and the router stops choosing it. If
    the poll comes first, this function stops the replica again.
    """

    def calls_to_other_replicas() -> float:
        metrics = shard_metrics(router)
        return sum(metrics[name] for name in ("hedges 1", "hung 1"))

    before = calls_to_other_replicas()
    for _ in range(HANGS_MAX):
        os.kill(shard.process.pid, signal.SIGSTOP)
        try:
            load.wait_for_more()
        finally:
            os.kill(shard.process.pid, signal.SIGCONT)
        if calls_to_other_replicas() > before:
            return
        load.wait_for(lambda: replicas(router) == [2, 2])
    raise AssertionError("the replica that hung was not called")


def test_lost_part_fails_only_requests_for_its_rows(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish_next(store, 1)
    with cluster(store, tmp_path) as one:
        one.start_shards()
        router = one.start_router()
        lenient = one.start_router("--on-missing", "user=zeros")
        assert "missing_ids" not in post_embed(lenient, user=[[3, 97]]).json()
        assert post_embed(router, user=[[97]]).status_code == 200
        one.shards[1, 0].process.kill()
        one.shards[1, 0].process.wait()
        response = post_embed(router, user=[[97]])
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert (
            response.json()["error"]["message"] == "part 1 of 2 of 'm' version 1 is not available"
        )
        assert post_embed(router, user=[[3]]).status_code == 200
        partial = post_embed(lenient, user=[[3, 97, 98]]).json()
        assert partial["missing_ids"] == {"user": 2}
        assert partial["values"] == [[STEP + 3.0] * DIM]
        assert "missing_ids" not in post_embed(lenient, user=[[3]]).json()
        exported = lenient.metrics()
        missing_parts_metric = (
            'embedserve_missing_parts_total{alias="",model="m",part="%d",version="1"} %d.0'
        )
        assert missing_parts_metric % (0, 0) in exported
        assert missing_parts_metric % (1, 1) in exported
        assert replicas(router) == [1, 0]
        metrics = shard_metrics(router)
        assert (metrics["calls 0 ok"], metrics["calls 1 ok"]) == (1, 1)
        assert metrics["calls 1 unavailable"] == metrics["seconds_count 1"] - 1 == 1
        available, unavailable = router.model()["shards"]
        assert available == {"part": 0, "replicas": 1, "why": ""}
        assert unavailable["replicas"] == 0
        assert unavailable["why"].startswith("part 1 of 2 has no replica of m@1: 127.0.0.1:")
        one.start_shard(1)
        wait_until(lambda: post_embed(router, user=[[97]]).status_code == 200)
