"""Tests of the alias settings at the start of a process: they apply before the first poll."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from server.processes.rollout.following_process import FollowingProcess

from embedserve.processes import single_process
from embedserve.processes.rollout import store_watcher
from embedserve.processes.rollout.store_watcher import apply_initial_alias_settings
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve.processes.single_process import run_single_process
from embedserve.processes.startup.ports import claim_ports
from embedserve_store import set_alias


@pytest.fixture
def canary(store: Path, executor: ThreadPoolExecutor) -> FollowingProcess:
    """Returns a process that serves an alias with a shadow share of 20 percent."""
    set_alias(store, "shop", "canary", 1, shadow=20)
    return FollowingProcess(store, executor, "shop@canary", "alias")


async def test_alias_settings_apply_before_the_first_poll(canary: FollowingProcess) -> None:
    models = canary.pipeline.models
    await apply_initial_alias_settings(canary.settings, canary.rollout)
    assert models.status(models.model("shop@canary"))["shadow"] == 20


async def test_process_serves_only_after_it_has_alias_settings(
    canary: FollowingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that until then the startup server responds to probes."""
    models = canary.pipeline.models
    steps: list[tuple[str, float]] = []

    def note(step: str) -> None:
        steps.append((step, models.status(models.model("shop@canary"))["shadow"]))

    async def run_server(*_: object) -> None:
        note("serves")

    monkeypatch.setattr(single_process, "run_server", run_server)
    ports = claim_ports("127.0.0.1", 0, 0)
    ports.close()
    await run_single_process(
        canary.pipeline,
        canary.rollout,
        canary.settings,
        ports,
        lambda: note("startup server ends"),
        lambda: None,
        lambda: None,
    )
    assert steps == [("startup server ends", 20), ("serves", 20)]


async def test_start_waits_for_alias_settings_only_up_to_a_time_limit(
    canary: FollowingProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_return = threading.Event()
    monkeypatch.setattr(store_watcher, "SHARES_S_MAX", 0.05)
    monkeypatch.setattr(VersionResolver, "resolve", lambda *_: may_return.wait() and {})
    await apply_initial_alias_settings(canary.settings, canary.rollout)
    may_return.set()
    assert caplog.messages == [
        "the store did not return the shares within 0.05 s: they begin later"
    ]


async def test_start_continues_if_alias_settings_cannot_be_read(
    canary: FollowingProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers any exception of the store, after which the follower polls again."""
    monkeypatch.setattr(VersionResolver, "resolve", Mock(side_effect=RuntimeError("of a library")))
    await apply_initial_alias_settings(canary.settings, canary.rollout)
    assert caplog.messages == ["the shares cannot be read: they begin later"]
