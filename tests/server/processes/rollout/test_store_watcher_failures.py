"""Tests of the store watcher with versions that fail, and with faults of the store."""

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from server.processes.rollout.following_process import FollowingProcess, add_version
from server.thread_limit import make_thread_start_fail

from embedserve.processes.rollout.messages import StoreEntry
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve_store import StoreError, set_alias
from embedserve_store.errors import UnopenedError


async def test_failing_version_is_tried_once_and_logged_once(
    follower: FollowingProcess, caplog: pytest.LogCaptureFixture
) -> None:
    follower.failures[2] = StoreError("its goldens are answered otherwise")
    follower.add_version(2)
    for _ in range(3):
        assert await follower.poll() == 1
    assert follower.attempts == [2]
    assert caplog.messages == ["shop: version 2 stays out: its goldens are answered otherwise"]
    assert follower.pipeline.models.pending_versions[follower.name].state == "failed"
    follower.add_version(3)
    assert await follower.poll() == 3
    assert follower.pipeline.models.pending_versions == {}


async def test_version_with_unanswered_goldens_is_retried_at_each_poll(
    follower: FollowingProcess, caplog: pytest.LogCaptureFixture
) -> None:
    follower.failures[2] = UnopenedError("its goldens were not answered")
    follower.add_version(2)
    for _ in range(3):
        assert await follower.poll() == 1
    assert follower.attempts[:3] == [2, 2, 2]
    assert caplog.messages == ["shop: version 2 stays out: its goldens were not answered"]
    assert follower.pipeline.models.pending_versions[follower.name].state == "failed"
    follower.failures.clear()
    assert await follower.poll() == 2
    assert follower.next_version_status() == (None, False)


async def test_version_is_retried_after_no_thread_could_start_to_open_it(
    follower: FollowingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await follower.poll() == 1
    follower.add_version(2)
    resolve = VersionResolver.resolve

    def resolve_then_fail_thread(*args: Any, **kwargs: Any) -> dict[str, StoreEntry]:
        if not kwargs["is_all"]:  # a poll; the next thread opens the version
            make_thread_start_fail(monkeypatch, "follow")
        return resolve(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(VersionResolver, "resolve", resolve_then_fail_thread)
        assert await follower.poll() == 1
    shown, _ = follower.next_version_status()
    assert shown is not None
    assert "can't start new thread" in shown["reason"]
    assert await follower.poll() == 2


async def test_version_is_retried_after_a_pull_could_start_no_thread(
    follower: FollowingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await follower.poll() == 1
    follower.add_version(2)
    with monkeypatch.context() as patched:
        no_thread = Mock(side_effect=RuntimeError("can't start new thread"))
        patched.setattr(VersionResolver, "open_number", no_thread)
        assert await follower.poll() == 1
    assert no_thread.called
    assert await follower.poll() == 2


async def test_incomplete_version_folder_is_retried_until_it_is_complete(
    follower: FollowingProcess, unpublished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers a folder that is copied into the store file by file."""
    caplog.set_level(logging.INFO)
    (follower.store / "shop" / "2").mkdir()
    for name in ("goldens.safetensors", "plan.json", "manifest.json", "tables.safetensors"):
        for _ in range(2):
            assert await follower.poll() == 1
        shutil.copy(unpublished / "shop" / "2" / name, follower.store / "shop" / "2")
    assert await follower.poll() == 2
    assert follower.attempts == [2]
    *logged, switched = caplog.messages
    assert len(logged) == len(set(logged)) == 2  # no manifest, then no tables
    assert all(line.startswith("shop: version 2 stays out: ") for line in logged)
    assert switched.startswith("shop: switched to version 2")
    assert follower.next_version_status() == (None, False)


def cut_tables(folder: Path) -> None:
    tables = folder / "tables.safetensors"
    tables.chmod(0o644)
    with tables.open("r+b") as file:
        file.truncate(tables.stat().st_size - 16)


def damage_goldens(folder: Path) -> None:
    goldens = folder / "goldens.safetensors"
    goldens.chmod(0o644)
    goldens.write_bytes(b"damaged")


@pytest.mark.parametrize(
    ("damage", "named"),
    [(cut_tables, "tables.safetensors"), (damage_goldens, "goldens.safetensors")],
)
async def test_unopenable_version_is_shown_with_reason_and_retried_at_each_poll(
    follower: FollowingProcess,
    unpublished: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    named: str,
) -> None:
    intact = shutil.copytree(unpublished / "shop" / "2", unpublished / "intact")
    damage(unpublished / "shop" / "2")
    follower.add_version(2)
    seen = []
    for _ in range(3):
        assert await follower.poll() == 1
        shown, has_failed = follower.next_version_status()
        assert shown is not None
        assert (shown["version"], shown["state"], has_failed) == (2, "failed", True)
        assert named in shown["reason"]
        seen.append(shown)
    assert caplog.messages == [f"shop: version 2 stays out: {seen[0]['reason']}"]
    assert seen[0] == seen[2]
    shutil.rmtree(follower.store / "shop" / "2")
    intact.rename(follower.store / "shop" / "2")
    assert await follower.poll() == 2
    assert follower.next_version_status() == (None, False)


async def test_version_without_disk_space_for_its_pull_is_shown_with_reason(
    store: Path,
    executor: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checks that the reason, in which the free bytes differ at each poll, is shown, but logged
    once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    process = FollowingProcess(f"file://{store}", executor)
    add_version(store, 2)
    usage = SimpleNamespace(total=1 << 30)
    for usage.free in (0, 77, 1_088):
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", lambda path: usage)
            assert await process.poll() == 1
        shown, has_failed = process.next_version_status()
        assert shown is not None
        assert (shown["version"], shown["state"], has_failed) == (2, "failed", True)
        assert f"{usage.free:,}" in shown["reason"]
    assert len(caplog.messages) == 1
    assert await process.poll() == 2
    assert process.next_version_status() == (None, False)


async def test_repaired_version_with_wrong_goldens_is_tried_once(
    follower: FollowingProcess, unpublished: Path
) -> None:
    """Covers a version that opens and fails its goldens, also if it could not be opened at
    first."""
    follower.failures[2] = StoreError("its goldens are answered otherwise")
    intact = shutil.copytree(unpublished / "shop" / "2", unpublished / "intact")
    cut_tables(unpublished / "shop" / "2")
    follower.add_version(2)
    assert await follower.poll() == 1
    shutil.rmtree(follower.store / "shop" / "2")
    intact.rename(follower.store / "shop" / "2")
    for _ in range(3):
        assert await follower.poll() == 1
    assert follower.attempts == [2]
    shown, has_failed = follower.next_version_status()
    assert shown is not None
    assert (shown["reason"], has_failed) == ("its goldens are answered otherwise", True)


async def test_unreachable_store_is_followed_again_once_it_is_back(
    follower: FollowingProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    away = follower.store.rename(follower.store.parent / "away")
    for _ in range(3):
        assert await follower.poll() == 1
    away.rename(follower.store)
    follower.add_version(2)
    assert await follower.poll() == 2
    lost, regained, switched = caplog.messages
    assert lost.startswith("shop cannot be followed: ")
    assert "No such file" in lost
    assert regained == "shop can be followed again"
    assert switched.startswith("shop: switched to version 2")


async def test_version_of_a_removed_alias_stays_served(
    store: Path, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    set_alias(store, "shop", "stable", 1)
    process = FollowingProcess(store, executor, "shop@stable")
    set_alias(store, "shop", "stable", None)
    assert await process.poll() == 1
    process.add_version(2)
    assert await process.poll() == 1
    (logged,) = caplog.messages
    assert "its alias does not exist: its version stays" in logged
