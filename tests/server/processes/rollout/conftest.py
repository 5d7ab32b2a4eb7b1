"""Fixtures of the tests of rollouts: a store of versions, workers, and a switching process."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server.processes.rollout.coordinated_workers import Workers
from server.processes.rollout.following_process import PUBLISH, FollowingProcess
from server.processes.rollout.switching_process import SwitchingProcess
from server.python import run_warm_python


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a store with versions 1, 2 and 3 of "shop"."""
    store = tmp_path_factory.mktemp("versions") / "store"
    done = run_warm_python("-c", PUBLISH, store)
    assert done.returncode == 0, done.stderr
    return store


@pytest.fixture
def unpublished(published: Path, tmp_path: Path) -> Path:
    """Returns the folder of the versions that are yet to appear in ``store``."""
    return shutil.copytree(published, tmp_path / "unpublished")


@pytest.fixture
def store(unpublished: Path, tmp_path: Path) -> Path:
    """Returns a store with version 1 only."""
    (tmp_path / "store" / "shop").mkdir(parents=True)
    (unpublished / "shop" / "1").rename(tmp_path / "store" / "shop" / "1")
    return tmp_path / "store"


@pytest.fixture
def workers() -> Workers:
    """Returns two workers; the first one watches the store."""
    workers = Workers()
    workers.start(0, 1)
    assert workers.store_watchers() == [0]
    workers.take_target_changes()
    return workers


@pytest.fixture
def process(executor: ThreadPoolExecutor) -> SwitchingProcess:
    return SwitchingProcess(executor)


@pytest.fixture
def follower(store: Path, executor: ThreadPoolExecutor) -> FollowingProcess:
    """Returns a process that follows the latest version of "shop"; version 1 at first."""
    return FollowingProcess(store, executor)
