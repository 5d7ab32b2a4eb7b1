"""Tests of the checks before any shard is placed in Ray, without Ray."""

import importlib.util
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from running_servers import free_port
from server.python import run_python

from embedserve.config import ServeSettings
from embedserve.processes import local_cluster
from embedserve.processes.cluster_child import Child
from embedserve.processes.cluster_settings import ClusterSettings
from embedserve.processes.local_cluster import _placed, run_cluster
from embedserve.processes.ray_backend import shard_actor
from embedserve.processes.ray_backend.address_follower import following_ray
from embedserve.processes.ray_backend.connection import check_address, check_shards_name
from embedserve.processes.ray_backend.placement import PlacementSettings, check_nodes
from embedserve.processes.ray_backend.shard_watch import ShardName
from embedserve_store import StoreError


def test_shard_name_is_parsed_from_its_actor_name() -> None:
    name = ShardName("shop", 1, 3, 0)
    assert str(name) == "shop/1/3/0"
    assert ShardName.parse(str(name)) == name
    for other in (
        "shop",
        "shop/1/3",
        "shop/3/3/0",
        "shop/1/x/0",
        "a/shop/1/3/0",
        "shop/-1/3/0",
        f"shop/0/{10**9}/0",
    ):
        assert ShardName.parse(other) is None, other


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "a" * 64, "é"])
def test_invalid_names_of_shards_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="the name of shards in Ray is") as caught:
        check_shards_name(name)
    assert repr(name) in str(caught.value)
    check_shards_name("Shop-1.a_b")


@pytest.mark.parametrize("address", ["", "local", "ray://h:10001", "h", "h:x"])
def test_invalid_ray_addresses_are_rejected(address: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT of its head node, or auto") as caught:
        check_address(address)
    assert repr(address) in str(caught.value)


def test_address_without_a_ray_cluster_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    unused_address = f"127.0.0.1:{free_port()}"
    with pytest.raises(OSError, match=f"no Ray cluster at {unused_address}: .*refused"):
        check_address(unused_address)
    monkeypatch.setenv("RAY_ADDRESS", unused_address)
    with pytest.raises(OSError, match=f"no Ray cluster at {unused_address}"):
        check_address("auto")
    monkeypatch.setenv("RAY_ADDRESS", "")
    check_address("auto")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        check_address(f"127.0.0.1:{listener.getsockname()[1]}")


def test_missing_ray_package_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    install = r"^ray is not installed: pip install 'embedserve\[ray\]'$"
    with pytest.raises(ValueError, match=install):
        run_cluster(ClusterSettings(str(tmp_path), backend="ray"))
    settings = ServeSettings(str(tmp_path), shards="ray:shop")
    with pytest.raises(ValueError, match=install), following_ray(settings):
        pass


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (ClusterSettings("s", backend="k8s"), "backend is 'k8s', expected local or ray"),
        (ClusterSettings("s", backend="ray", name="a/b"), "the name of shards in Ray is 'a/b'"),
        (
            ClusterSettings("s", backend="ray", shard_memory="4XB"),
            "shard_memory is '4XB', expected a size",
        ),
        (ClusterSettings("s", shard_memory="1GB"), "shard_memory is '1GB', but backend is local"),
        (ClusterSettings("s", name="shop"), "name is 'shop', but backend is local: it is for ray"),
    ],
)
def test_invalid_cluster_settings_are_named_in_the_error(
    settings: ClusterSettings, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        run_cluster(settings)


def test_shards_in_ray_get_the_arguments_of_local_shards(tmp_path: Path) -> None:
    settings = ClusterSettings("s", ("m",), replicas=3, shard_memory="2GiB", ray_address="h:1")
    *_, action, placed = _placed(settings, 2, tmp_path / "shards.json")
    assert action == "place"
    assert f'"path": "{tmp_path}/shards.json"' in placed
    assert '"serve", "s", "--model", "m", "--part", "1/2", "--devices", "cpu"' in placed
    assert f'"replicas": 3, "memory_bytes": {2 << 30}' in placed
    assert '"name": "embedserve", "ray_address": "h:1"' in placed


def test_relative_paths_become_absolute_for_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers Ray's processes, which run in another folder."""
    monkeypatch.chdir(tmp_path)
    read: list[ClusterSettings] = []

    def read_parts(settings: ClusterSettings) -> int:
        read.append(settings)
        raise StoreError("far enough")

    monkeypatch.setattr(local_cluster, "_check_backend", lambda settings: None)
    monkeypatch.setattr(local_cluster, "read_parts", read_parts)
    for store, cache in (("store", "cache"), ("s3://bucket/store", "")):
        with pytest.raises(StoreError, match="far enough"):
            run_cluster(ClusterSettings(store, backend="ray", cache=cache, shard_config=cache))
    assert (read[0].store, read[0].cache) == (f"{tmp_path}/store", f"{tmp_path}/cache")
    assert read[0].shard_config == f"{tmp_path}/cache"
    assert (read[1].store, read[1].cache) == ("s3://bucket/store", "")
    assert read[1].shard_config == ""


def test_invalid_name_in_the_shards_option_is_rejected() -> None:
    settings = ServeSettings("store", shards="ray:a/b")
    words = "^--shards is 'ray:a/b': the name of shards in Ray is 'a/b'"
    with pytest.raises(ValueError, match=words), following_ray(settings):
        pass


def test_shard_address_of_another_host_is_rejected() -> None:
    """Covers a Ray node that has the address of a router in front of it."""
    child = Child("part 0", [sys.executable], shard_host="203.0.113.1")
    with pytest.raises(OSError, match=r"cannot listen on 203\.0\.113\.1"):
        child.start("")
    assert child.process is None


STOPPED = """
import os, sys, time
from types import SimpleNamespace
from embedserve.processes.ray_backend import shard_actor

sleeps = []
def sleep(seconds):
    sleeps.append(seconds)
    time.sleep(0.01)

shard_actor.time = SimpleNamespace(sleep=sleep)
arguments = ["-c", "import time; time.sleep(60)"]
actor = shard_actor.ShardActor("part 0", arguments, "127.0.0.1", os.environ)
while actor._child.process is None:
    time.sleep(0.01)
actor.stop()
while len(sleeps) < 3:
    time.sleep(0.01)
print(actor.state().exit_code, flush=True)
os._exit(0)
"""


def test_stopped_actor_does_not_exit_by_itself() -> None:
    """Guards against a restart by Ray, which would also start the shard again."""
    ended = run_python("-c", STOPPED)
    assert (ended.returncode, ended.stdout) == (0, f"{-signal.SIGTERM}\n"), ended.stderr


def test_too_few_nodes_error_names_the_numbers() -> None:
    large, small = {"CPU": 4.0, "memory": 8e9}, {"CPU": 4.0, "memory": 1e9}
    nodes = [{"Alive": True, "Resources": large}, {"Alive": True, "Resources": small}]
    dead_node = {"Alive": False, "Resources": large}
    check_nodes(nodes, 2, {"CPU": 1})
    with pytest.raises(ValueError, match=r"replicas is 3, .* 2 nodes are alive, and 2 are that"):
        check_nodes([*nodes, dead_node], 3, {"CPU": 1})
    resources = PlacementSettings("n", "auto", "p", [], 2, 4 << 30).resources()
    words = r"replicas is 2, .* with 1 CPU and 4\.0 GiB of memory: 2 nodes are alive, and 1 are"
    with pytest.raises(ValueError, match=words):
        check_nodes([*nodes, dead_node], 2, resources)


def test_environment_of_a_process_is_the_one_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Path("/proc/self/environ").read_bytes()
    monkeypatch.setenv("OMP_NUM_THREADS", "17")  # after its start
    found = shard_actor.environment_of(os.getpid())
    assert found.get("OMP_NUM_THREADS") != "17"
    assert f"PATH={found['PATH']}".encode() in started.split(b"\0")
