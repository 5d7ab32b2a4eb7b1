"""Tests of the versions that a shard holds, and of when it unloads one."""

import logging
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server.fake_models import model_info

from embedserve.config import ServeSettings
from embedserve.errors import ConflictError
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve.processes.open_store import VersionsToHold, versions_to_hold
from embedserve.processes.rollout.shard_versions import IDLE_S, RETRY_S, ShardVersions, next_step
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve_store.errors import NoSuchPartError


def to_hold(*numbers: int, aliased: Collection[int] = ()) -> VersionsToHold:
    return VersionsToHold(frozenset(numbers), frozenset(aliased))


@pytest.mark.parametrize(
    ("versions", "held", "idle", "step"),
    [
        (to_hold(6, 7), {6, 7}, {6, 7}, None),
        (to_hold(6, 7), {6}, set(), ("load", 7)),
        (to_hold(6, 7), set(), set(), ("load", 7)),  # the newest first
        (to_hold(6, 7), {7}, set(), ("load", 6)),
        (to_hold(7, 8), {6, 7}, set(), None),  # routers use both: the next one waits
        (to_hold(7, 8), {6, 7}, {6}, ("unload", 6)),
        (to_hold(7, 8), {7}, {7}, ("load", 8)),
        (to_hold(7, 8), {6, 7}, {7}, ("unload", 7)),  # 7 failed in the routers: they stay with 6
        (to_hold(7, 8), {6, 8}, {8}, None),  # 8 is the newest: it stays until routers use it
        (to_hold(7, 8, aliased=[7]), {6, 7}, {7}, None),  # an alias names 7
        (to_hold(3, 7, 8, aliased=[3]), {5, 6, 7}, {7}, ("unload", 7)),  # also if 3 is missing, too
        (to_hold(3, 7, 8, aliased=[3]), {3, 7}, set(), ("load", 8)),  # aliases count apart
        (to_hold(7, 8), {5, 6}, {5, 6}, ("unload", 5)),
        (to_hold(7, 8), {6}, {6}, ("load", 8)),  # the last one stays until another is loaded
        (to_hold(7, 8), {6, 8}, {6}, ("unload", 6)),
        (to_hold(), {6}, {6}, None),
    ],
)
def test_next_step_loads_or_unloads_one_version(
    versions: VersionsToHold, held: set[int], idle: set[int], step: tuple[str, int] | None
) -> None:
    assert next_step(versions, held, idle, 2) == step


def test_newest_and_aliased_versions_are_to_be_held() -> None:
    aliases = {"stable": SimpleNamespace(version=3), "gone": SimpleNamespace(version=4)}
    store: Any = SimpleNamespace(versions=lambda _: [2, 3, 5, 9], aliases=lambda _: aliases)
    assert versions_to_hold(store, "shop", 2) == to_hold(3, 5, 9, aliased=[3])
    assert versions_to_hold(store, "shop", 2, {3, 9}) == to_hold(2, 5)
    assert versions_to_hold(store, "shop", 10) == to_hold(2, 3, 5, 9, aliased=[3])


def test_unreadable_store_is_logged_once(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    resolver = VersionResolver(ServeSettings(str(store), part="0/2"))
    away = store.rename(store.parent / "away")
    for _ in range(3):
        assert resolver.versions_to_hold("shop", ()) is None
    away.rename(store)
    assert resolver.versions_to_hold("shop", ()) == to_hold(1)
    lost, regained = caplog.messages
    assert lost.startswith("versions of shop cannot be followed: ")
    assert regained == "versions of shop can be followed again"


class Shard:
    """A shard of model shop, its clock, and the versions that it holds. The store cannot read other
    models.

    Attributes:
        to_hold: versions of shop that it should hold.
        unloadable: versions that cannot be loaded.
        without_parts: versions without parts.
        unfit: versions that the shard knows to have no parts.
        steps: loads and unloads so far.
    """

    def __init__(self, *held: int, to_hold: VersionsToHold) -> None:
        self.to_hold = to_hold
        self.unloadable: set[int] = set()
        self.without_parts: set[int] = set()
        self.unfit: set[int] = set()
        self.now_s = 0.0
        self.steps: list[str] = []
        self.metrics = {f"shop@{number}": ModelMetrics(model_info()) for number in held}
        settings = ServeSettings("store", model=("shop",), part="0/2")
        parts: Any = self
        self.shard_versions = ShardVersions(
            settings, parts, parts, self.metrics, lambda: self.now_s
        )

    def versions_to_hold(self, model: str, unfit: Collection[int]) -> VersionsToHold | None:
        if model != "shop":
            return None
        self.unfit = set(unfit)
        return self.to_hold

    def count_request(self, number: int) -> None:
        self.metrics[f"shop@{number}"].version.requests.count_answered(0.001)

    async def load(self, name: str) -> int:
        number = int(name.partition("@")[2])
        if number in self.unloadable:
            raise ConflictError(f"{name} cannot be read")
        if number in self.without_parts:
            raise ConflictError(f"{name} has no parts") from NoSuchPartError()
        self.steps.append(f"load {number}")
        self.metrics[name] = ModelMetrics(model_info())
        return number

    async def unload(self, name: str) -> None:
        self.steps.append(f"unload {name.partition('@')[2]}")
        del self.metrics[name]


async def test_version_is_unloaded_after_a_minute_without_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    shard = Shard(6, 7, to_hold=to_hold(7, 8))
    for _ in range(3):
        shard.count_request(6)
        shard.count_request(7)
        shard.now_s += IDLE_S / 2
        await shard.shard_versions.update()
    assert shard.steps == []
    assert caplog.text.count("shop version 8 waits") == 1
    shard.now_s += IDLE_S - 1
    await shard.shard_versions.update()
    assert shard.steps == []
    shard.count_request(7)
    shard.now_s += 1
    await shard.shard_versions.update()
    assert shard.steps == ["unload 6", "load 8"]
    assert sorted(shard.metrics) == ["shop@7", "shop@8"]


async def test_version_that_is_loaded_again_has_a_minute_again() -> None:
    shard = Shard(6, 7, to_hold=to_hold(7))
    await shard.shard_versions.update()
    shard.now_s += IDLE_S
    await shard.shard_versions.update()
    shard.now_s += IDLE_S
    await shard.shard_versions.update()
    await shard.load("shop@6")  # by an administrator
    await shard.shard_versions.update()
    shard.now_s += IDLE_S - 1
    await shard.shard_versions.update()
    assert shard.steps == ["unload 6", "load 6"]
    shard.now_s += 1
    await shard.shard_versions.update()
    assert shard.steps == ["unload 6", "load 6", "unload 6"]


async def test_version_that_fails_to_load_is_retried_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard = Shard(7, to_hold=to_hold(7, 8))
    shard.unloadable = {8}
    await shard.shard_versions.update()
    shard.now_s += RETRY_S - 1
    await shard.shard_versions.update()
    assert caplog.text.count("shop@8: load fails: shop@8 cannot be read") == 1
    shard.unloadable = set()
    shard.now_s += 1
    await shard.shard_versions.update()
    assert shard.steps == ["load 8"]


async def test_a_version_without_parts_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    shard = Shard(8, to_hold=to_hold(7, 8))
    shard.without_parts = {7}
    for _ in range(3):
        await shard.shard_versions.update()
        shard.now_s += RETRY_S
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "shop@7 is not held: shop@7 has no parts"
    assert shard.unfit == {7}
    shard.to_hold = to_hold(8, 9)
    await shard.shard_versions.update()
    assert shard.steps == ["load 9"]


async def test_last_version_stays_while_no_newer_version_can_be_loaded() -> None:
    shard = Shard(5, 6, to_hold=to_hold(7, 8))
    shard.unloadable = {7, 8}
    await shard.shard_versions.update()
    shard.now_s += IDLE_S
    await shard.shard_versions.update()
    assert sorted(shard.metrics) == ["shop@6"]
    shard.unloadable = set()
    shard.now_s += RETRY_S
    await shard.shard_versions.update()
    assert shard.steps == ["unload 5", "load 8", "unload 6", "load 7"]


async def test_versions_of_an_unreadable_model_stay_and_do_not_count_for_another_model() -> None:
    shard = Shard(to_hold=to_hold(7, 8))
    for name in ("films@1", "films@2", "shop@7"):
        shard.metrics[name] = ModelMetrics(model_info())
    for _ in range(2):
        await shard.shard_versions.update()
        shard.now_s += IDLE_S
    assert shard.steps == ["load 8"]


async def test_versions_named_in_settings_do_not_change() -> None:
    shard = Shard(7, to_hold=to_hold(7, 8))
    parts: Any = shard
    settings = ServeSettings("store", model=("shop@7",), part="0/2")
    await ShardVersions(settings, parts, parts, shard.metrics).update()
    assert shard.steps == []


@pytest.mark.parametrize("name", ["shop", "shop@stable"])
async def test_names_without_a_version_number_stay(name: str) -> None:
    shard = Shard(7, to_hold=to_hold(8))
    shard.metrics[name] = ModelMetrics(model_info())
    for _ in range(2):
        await shard.shard_versions.update()
        shard.now_s += IDLE_S
    assert shard.steps == ["load 8", "unload 7"]
    assert sorted(shard.metrics) == sorted([name, "shop@8"])
