"""Fixtures that are slow to make, such as training runs, shared by all folders and processes."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from forkserver import PYTHON, WarmPopen, run_warm

if TYPE_CHECKING:
    from trained import Trained

TRUSTED = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that name the trusted certificate authorities."""


def check_descriptor(descriptor: int) -> None:
    """Replaces ``os.fsync``, which waits some 5 ms for the disk, twelve times for each version.

    Only a loss of power would show the difference. Processes that tests start flush their files.
    """
    os.fstat(descriptor)


system: Any = os
system.fsync = check_descriptor

with suppress(ModuleNotFoundError):  # hosts of the GPU tests may lack it
    from hypothesis import HealthCheck, settings

    # A busy machine makes examples slow, and that does not make a test fail.
    slow = [HealthCheck.too_slow]
    common = settings(deadline=None, suppress_health_check=slow)
    # `make properties` looks for inputs that nobody tried. `make test` tries the same in each run,
    # so that a change fails for what it did.
    settings.register_profile("random", common, max_examples=1000)
    settings.register_profile("repeatable", common, derandomize=True)
    settings.load_profile("repeatable")

with suppress(ModuleNotFoundError):
    import httpx._transports.default

    transports: Any = httpx._transports.default
    create_ssl_context = transports.create_ssl_context

    @cache
    def create_default_context(trust_env: bool, *trusted: str | None) -> Any:
        """Creates an SSL context, once for each set of arguments.

        Reading the certificates of all authorities takes 30 ms. httpx reads them for each client,
        even for one that sends plain HTTP.
        """
        return create_ssl_context(trust_env=trust_env)

    def create_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
        if verify is True and cert is None:
            return create_default_context(trust_env, *map(os.environ.get, TRUSTED))
        return create_ssl_context(verify=verify, cert=cert, trust_env=trust_env)

    transports.create_ssl_context = create_context

with suppress(ModuleNotFoundError):
    import typer.testing

    runner: Any = typer.testing  # would build all commands anew for each command that a test runs
    runner._get_command = cache(runner._get_command)

MadeOnce = Callable[[str, Callable[[Path], None]], Path]
WARM_S_MAX = 300


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Returns the number of processes for ``-n auto``: one more than there are cores, at most 4.

    Tests wait for the servers that they start, so that one more process keeps the cores busy. Each
    process may take 4 GB.
    """
    return min(4, len(os.sched_getaffinity(0)) + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Forks the processes of ``-n`` from a fork server, and for each a fork server of its own.

    Else each would import torch and start a fork server, which takes 13 s of CPU time.
    They do so on hosts with GPUs: FBGEMM's import looks for those, and CUDA fails in forks of a
    process that did.
    """
    if os.path.exists("/dev/nvidiactl"):
        return
    from execnet import gateway_base, gateway_io

    model: Any = gateway_base.MainThreadOnlyExecModel
    model.subprocess = SimpleNamespace(
        PIPE=subprocess.PIPE, Popen=partial(WarmPopen, has_forker=True)
    )
    gateway_io.popen_args = lambda spec: [*PYTHON, "-c", gateway_io.popen_bootstrapline]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects the tests without garbage collection, and freezes all objects afterwards.

    The objects of torch, other modules and the tests live until the end. Each scan of them by the
    garbage collector takes half a second.

    All loggers propagate afterwards. pytest adds its handlers six times for each test to each
    logger that does not, and torch has sixty of those.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        for logger in logging.Logger.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Returns ``made_once``: ``made_once("demo", make)`` is a folder that ``make(folder)`` filled
    once.

    Tests must not change that folder. The tests run in several processes (pytest-xdist), whose
    temporary folders are inside a common one.
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
    """Returns a function: ``trained_by(2)`` is the result of a training run on two processes."""
    from trained import read_trained, train  # imports torch, which the controller does not need

    def trained(world_size: int) -> Trained:
        folder = made_once(f"trained-by-{world_size}", lambda folder: train(folder, world_size))
        return read_trained(folder, world_size)

    return cache(trained)


@pytest.fixture(scope="session")
def warm() -> None:
    """Starts the fork server before the first test, so that no test's time includes its start."""
    assert run_warm([*PYTHON, "-c", ""], timeout=WARM_S_MAX).returncode == 0
