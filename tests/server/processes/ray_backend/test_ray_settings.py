"""What is checked before any shard is placed in Ray, without Ray."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

import pytest
from running_servers import free_port

from embedserve.config import ServeSettings
from embedserve.processes.local_cluster import ClusterSettings, _placed, run_cluster
from embedserve.processes.ray_backend import shard_actor
from embedserve.processes.ray_backend.address_follower import following_ray
from embedserve.processes.ray_backend.connection import check_address, check_shards_name
from embedserve.processes.ray_backend.placement import PlacementSettings, check_nodes
from embedserve.processes.ray_backend.shard_watch import ShardName


def test_names_of_shards_are_names_of_actors() -> None:
    name = ShardName("shop", 1, 3, 0)
    assert str(name) == "shop/1/3/0"
    assert ShardName.parse(str(name)) == name
    for other in ("shop", "shop/1/3", "shop/3/3/0", "shop/1/x/0", "a/shop/1/3/0", "shop/-1/3/0"):
        assert ShardName.parse(other) is None, other


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "a" * 64, "é"])
def test_wrong_names_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="the name of shards in Ray is") as caught:
        check_shards_name(name)
    assert repr(name) in str(caught.value)
    check_shards_name("Shop-1.a_b")


@pytest.mark.parametrize("address", ["", "local", "ray://h:10001", "h", "h:x"])
def test_wrong_addresses_are_rejected(address: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT of its head node, or auto") as caught:
        check_address(address)
    assert repr(address) in str(caught.value)


def test_an_address_without_ray_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(OSError, match=f"no Ray cluster at {nobody}: .*refused"):
        check_address(nobody)
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    with pytest.raises(OSError, match=f"no Ray cluster at {nobody}"):
        check_address("auto")
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        check_address(f"127.0.0.1:{somebody.getsockname()[1]}")


def test_a_missing_ray_is_one_line_that_names_the_extra(
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
        (ClusterSettings("s", shard_memory="1GB"), "shard_memory is '1GB', but backend is local"),
    ],
)
def test_wrong_settings_are_named(settings: ClusterSettings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_cluster(settings)


def test_shards_in_ray_are_those_of_this_host(tmp_path: Path) -> None:
    settings = ClusterSettings("s", ("m",), replicas=3, shard_memory="2GiB", ray_address="h:1")
    *_, action, placed = _placed(settings, 2, tmp_path / "shards.json")
    assert action == "place"
    assert f'"path": "{tmp_path}/shards.json"' in placed
    assert '"serve", "s", "--model", "m", "--part", "1/2", "--devices", "cpu"' in placed
    assert f'"replicas": 3, "memory_bytes": {2 << 30}' in placed
    assert '"name": "embedserve", "ray_address": "h:1"' in placed


def test_too_few_nodes_are_an_error_that_names_the_numbers() -> None:
    large, small = {"CPU": 4.0, "memory": 8e9}, {"CPU": 4.0, "memory": 1e9}
    nodes = [{"Alive": True, "Resources": large}, {"Alive": True, "Resources": small}]
    gone = {"Alive": False, "Resources": large}
    check_nodes(nodes, 2, {"CPU": 1})
    with pytest.raises(ValueError, match=r"replicas is 3, .* 2 nodes are alive, and 2 are that"):
        check_nodes([*nodes, gone], 3, {"CPU": 1})
    resources = PlacementSettings("n", "auto", "p", [], 2, 4 << 30).resources()
    words = r"replicas is 2, .* with 1 CPU and 4\.0 GiB of memory: 2 nodes are alive, and 1 are"
    with pytest.raises(ValueError, match=words):
        check_nodes([*nodes, gone], 2, resources)


def test_shards_have_the_environment_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Path("/proc/self/environ").read_bytes()
    monkeypatch.setenv("OMP_NUM_THREADS", "17")  # since its start
    found = shard_actor.environment_of(os.getpid())
    assert found.get("OMP_NUM_THREADS") != "17"
    assert f"PATH={found['PATH']}".encode() in started.split(b"\0")
