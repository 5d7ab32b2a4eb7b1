"""Tests of the version manager: names that are added and removed, and their shares of requests."""

import gc
import weakref
from dataclasses import replace

import pytest
from server.fake_engine import model_info
from server.processes.rollout.switching_process import SwitchingProcess, make_version
from server.waiting import until

from embedserve.errors import UnknownModelError
from embedserve.metrics.model_metrics import COLUMNS_MIN, NAMES_SPARE
from embedserve.processes.rollout.messages import (
    AliasSettings,
    Failure,
    LoadState,
    NameStatus,
    WorkerStatus,
)


async def test_version_with_more_features_than_counters_fails(
    process: SwitchingProcess,
) -> None:
    for number, count in ((8, COLUMNS_MIN + 1), (9, COLUMNS_MIN)):
        many = model_info("shop", {f"f{i}": (2, 1) for i in range(count)})
        process.versions_to_open[number] = make_version(replace(many.manifest, version=number))
    process.prepare(8)
    await until(lambda: process.state().state is LoadState.FAILED)
    message = "has 1025 features or keys, and this server has room to count 1024"
    assert message in process.state().reason
    assert process.restored_numbers == []
    await process.prepare_and_wait(9)


async def test_name_without_free_counters_fails(process: SwitchingProcess) -> None:
    for i in range(NAMES_SPARE):
        await process.prepare_and_wait(8, f"shop@spare{i}")
        process.activate(f"shop@spare{i}")
    restored = len(process.restored_numbers)
    process.prepare(8, "shop@more")
    await until(lambda: process.state("shop@more").state is LoadState.FAILED)
    message = "shop@more: this server has room to count 17 names since its start: restart it"
    assert process.state("shop@more").reason == message
    assert len(process.restored_numbers) == restored
    process.remove("shop@more")
    process.remove("shop@spare0")
    await process.prepare_and_wait(8, "shop@more")
    process.activate("shop@more")
    await process.check_served(8, "shop@more")


async def test_a_name_is_added_and_removed(process: SwitchingProcess) -> None:
    rollout = process.rollout
    message = r"^version is 'canary': the versions of shop are 7$"
    with pytest.raises(UnknownModelError, match=message):
        await process.check_served(8, "shop@canary")
    assert rollout.number("shop@canary") is None
    await process.prepare_and_wait(8, "shop@canary")
    assert process.restored_numbers == [8]
    process.activate("shop@canary")
    for name, number in (("shop", 7), ("shop@canary", 8), ("shop@7", 7), ("shop@8", 8)):
        await process.check_served(number, name)
    assert process.pipeline.metrics.models["shop@canary"].store_version == 0  # no worker watches it
    message = r"^version is 9: the versions of shop are 7, 8 \(canary\)$"
    with pytest.raises(UnknownModelError, match=message):
        await process.check_served(9, "shop@9")
    engine = weakref.ref(process.engines.pop(8))
    targets = process.remove("shop@canary")
    await until(lambda: engine() is None)
    assert "shop@canary" not in process.pipeline.metrics.models
    with pytest.raises(UnknownModelError):
        await process.check_served(8, "shop@canary")
    await process.check_served(7)
    assert set(process.reports[-1].names) == set(targets)


async def test_version_prepared_for_a_removed_name_is_released(process: SwitchingProcess) -> None:
    engine = weakref.ref(process.engines[8])
    await process.prepare_and_wait(8, "shop@canary")
    del process.engines[8]
    targets = process.remove("shop@canary")
    assert set(process.reports[-1].names) == set(targets)
    assert process.pipeline.models.pending_versions == {}
    gc.collect()  # frees asyncio's futures
    await until(lambda: engine() is None)


async def test_name_whose_first_version_waits_loads_nothing(process: SwitchingProcess) -> None:
    """Covers a name that is unloaded and requested again before this process is notified."""
    for name in ("shop@canary", "shop"):
        process.desire(name, version=0)
    assert process.rollout.status() == WorkerStatus({"shop": NameStatus(7)})
    assert process.pipeline.models.pending_versions == {}
    await process.check_served(7)


async def test_last_name_serves_until_another_name_does(process: SwitchingProcess) -> None:
    """Covers a worker that started before the names changed."""
    process.prepare(8, "shop@canary")
    process.remove("shop")
    await process.check_served(7)
    process.activate("shop@canary")
    await until(lambda: set(process.rollout.versions) == {"shop@canary"})
    await process.check_served(8)


@pytest.fixture
async def canary(process: SwitchingProcess) -> SwitchingProcess:
    """Returns a process that serves version 8 as the canary."""
    await process.prepare_and_wait(8, "shop@canary")
    process.activate("shop@canary")
    return process


def set_share(process: SwitchingProcess, version: int, share: float, shadow: float = 0.0) -> None:
    process.desire("shop@canary", alias_settings=AliasSettings(version, share, shadow))


def current_shares(process: SwitchingProcess) -> tuple[float, float]:
    """Returns (share, shadow) of the version that serves the canary."""
    models = process.pipeline.models
    status = models.status(models.model("shop@canary"))
    return status["share"], status["shadow"]


async def test_traffic_share_begins_with_its_version(canary: SwitchingProcess) -> None:
    set_share(canary, 9, 50.0, 20.0)
    assert current_shares(canary) == (0.0, 0.0)
    await canary.prepare_and_wait(9, "shop@canary")
    assert current_shares(canary) == (0.0, 0.0)
    canary.activate("shop@canary")
    assert current_shares(canary) == (50.0, 20.0)
    set_share(canary, 9, 10.0)
    assert current_shares(canary) == (10.0, 0.0)


async def test_share_of_unloadable_version_goes_to_no_other_version(
    canary: SwitchingProcess,
) -> None:
    """Covers a bad canary without a share, whose next version, with half of the requests, cannot be
    loaded."""
    set_share(canary, 8, 0.0)
    set_share(canary, 9, 50.0)
    canary.desire("shop@canary", store_version=9, failure=Failure(9, "it cannot be read", True))
    for _ in range(50):
        await canary.check_served(7)
    set_share(canary, 8, 5.0)  # the alias is set back
    assert current_shares(canary) == (5.0, 0.0)


async def test_pending_share_is_dropped_with_its_alias(canary: SwitchingProcess) -> None:
    set_share(canary, 8, 30.0)
    set_share(canary, 9, 50.0)
    assert current_shares(canary) == (30.0, 0.0)
    set_share(canary, 0, 0.0)
    assert current_shares(canary) == (0.0, 0.0)
    await canary.prepare_and_wait(9, "shop@canary")
    canary.activate("shop@canary")
    assert current_shares(canary) == (0.0, 0.0)
