"""What takes long to make, such as a training run: each once for all folders and all processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from forkserver import PYTHON, run_warm

if TYPE_CHECKING:
    from trained import Trained

TRUSTED = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that name the authorities to trust."""

with suppress(ModuleNotFoundError):  # on a host that has what the GPU tests need and no more
    from hypothesis import HealthCheck, settings

    # A machine that is busy with something else is slow, and tests are right on it all the same.
    slow = [HealthCheck.too_slow]
    settings.register_profile("any speed", deadline=None, suppress_health_check=slow)
    settings.load_profile("any speed")

with suppress(ModuleNotFoundError):
    import httpx._transports.default

    transports: Any = httpx._transports.default
    create_ssl_context = transports.create_ssl_context

    @cache
    def create_default_context(trust_env: bool, *trusted: str | None) -> Any:
        """Reading the certificates of all authorities takes 30 ms, and httpx does so for each
        client, also for one that asks over plain HTTP."""
        return create_ssl_context(trust_env=trust_env)

    def create_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
        if verify is True and cert is None:
            return create_default_context(trust_env, *map(os.environ.get, TRUSTED))
        return create_ssl_context(verify=verify, cert=cert, trust_env=trust_env)

    transports.create_ssl_context = create_context

MadeOnce = Callable[[str, Callable[[Path], None]], Path]
WARM_S_MAX = 300


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For -n auto: one more than there are cores, as tests wait for the servers that they start; at
    most 4, each of which may take 4 GB."""
    return min(4, len(os.sched_getaffinity(0)) + 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What torch, the other modules and the tests themselves are made of stays to the end, and is
    looked through for garbage no more: that takes half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """made_once("demo", make): a folder that make(folder) filled. It is not to be changed.

    The tests run in several processes (pytest-xdist), whose own folders lie in a common one.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = base / name, base / f"{name}.done"
        with FileLock(base / f"{name}.lock"):
            if not done.exists():
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def trained_by(made_once: MadeOnce) -> Callable[[int], Trained]:
    """trained_by(2): what two processes trained."""
    from trained import read_trained, train  # torch, which who starts the tests need not import

    def trained(world_size: int) -> Trained:
        folder = made_once(f"trained-by-{world_size}", lambda folder: train(folder, world_size))
        return read_trained(folder, world_size)

    return cache(trained)


@pytest.fixture(scope="session")
def warm() -> None:
    """Warm Python has started: those seconds are no test's own."""
    assert run_warm([*PYTHON, "-c", ""], timeout=WARM_S_MAX).returncode == 0
