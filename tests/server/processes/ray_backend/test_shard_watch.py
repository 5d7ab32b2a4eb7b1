"""Tests of the file of addresses of shards in Ray, with actors that respond when the test says
so."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embedserve.processes.ray_backend import shard_watch
from embedserve.processes.ray_backend.shard_actor import ShardState
from embedserve.processes.ray_backend.shard_watch import ShardName, ShardWatch

SHARDS = [ShardName("s", part, 2, replica) for part in range(2) for replica in range(2)]
ADDRESSES = {shard: f"10.0.{shard.part}.{shard.replica}:1" for shard in SHARDS}
ALL_ADDRESSES = [["10.0.0.0:1", "10.0.0.1:1"], ["10.0.1.0:1", "10.0.1.1:1"]]


class EndedActorError(Exception):
    pass


class FakeRay:
    """Fake Ray with the actors of shards.

    Attributes:
        responding: shards whose actors respond.
        ended: shards whose actors have ended.
    """

    exceptions = SimpleNamespace(RayError=EndedActorError)

    def __init__(self) -> None:
        self.responding: set[ShardName] = set()
        self.ended: set[ShardName] = set()

    def actors(self) -> dict[ShardName, Any]:
        return {
            shard: SimpleNamespace(state=SimpleNamespace(remote=lambda shard=shard: shard))
            for shard in SHARDS
        }

    def wait(self, refs: list[ShardName], **_: object) -> tuple[list[ShardName], list[ShardName]]:
        done = [ref for ref in refs if ref in self.responding | self.ended]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: ShardName) -> ShardState:
        if ref in self.ended:
            raise EndedActorError("it has ended")
        return ShardState(ADDRESSES[ref], True, None)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(shard_watch, "POLL_S", 0)
    return fake


def watch_after_first_poll(ray: FakeRay, path: Path) -> ShardWatch:
    """Returns a watch that has polled once, before one of the shards has responded."""
    ray.responding = set(SHARDS[:-1])
    watch = ShardWatch(path)
    watch.adopt(ray.actors())
    watch.poll()
    return watch


def read_addresses(path: Path) -> list[list[str]]:
    return list(json.loads(path.read_text()).values())


def test_previous_addresses_stay_until_all_shards_have_responded(
    ray: FakeRay, tmp_path: Path
) -> None:
    path = tmp_path / "shards.json"
    path.write_text(before := json.dumps({"0": ["kept"], "1": ["kept"]}))
    watch = watch_after_first_poll(ray, path)
    assert path.read_text() == before
    ray.responding = set(SHARDS)
    watch.poll()
    assert read_addresses(path) == ALL_ADDRESSES


def test_watch_does_not_wait_for_ended_shards(ray: FakeRay, tmp_path: Path) -> None:
    path = tmp_path / "shards.json"
    path.write_text("{}")
    watch = watch_after_first_poll(ray, path)
    ray.ended = {SHARDS[-1]}
    watch.poll()
    assert read_addresses(path) == [ALL_ADDRESSES[0], ALL_ADDRESSES[1][:1]]


@pytest.mark.parametrize("is_late", [True, False])
def test_known_addresses_are_written_to_a_new_file_or_after_the_timeout(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    path = tmp_path / "shards.json"
    if is_late:
        monkeypatch.setattr(shard_watch, "ANSWER_S_MAX", 0)
        path.write_text("{}")
    watch_after_first_poll(ray, path)
    assert read_addresses(path) == [ALL_ADDRESSES[0], ALL_ADDRESSES[1][:1]]
