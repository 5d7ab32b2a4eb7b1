"""A process that will fork has another one pull its versions, and learns why it cannot."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn

import pytest
from server.python import run_python

from embedserve.config import ServeSettings
from embedserve.processes.startup import loading
from embedserve.processes.startup.loading import open_versions_to_fork
from embedserve_store import ModelVersion, StoreError
from embedserve_store.terminal.sigterm import Terminated, sigterm_interrupts

URL = ServeSettings("file:///nowhere")

PULLED = """
import sys

from embedserve.config import ServeSettings
from embedserve.processes.startup.loading import open_versions_to_fork

store = sys.argv[1]
settings = ServeSettings(f"file://{store}", model=sys.argv[2:3], default_model=sys.argv[3])
try:
    print(open_versions_to_fork(settings))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("model", "default", "kind"),
    [
        ("shop@", "", "ValueError model is 'shop@': expected NAME"),
        ("shop", "", "StoreError "),
    ],
)
def test_an_error_of_the_process_that_pulls_keeps_its_kind(
    tmp_path: object, model: str, default: str, kind: str
) -> None:
    """A setting that is wrong is not waited for, as a version that is missing may be."""
    done = run_python("-c", PULLED, str(tmp_path), model, default)
    assert done.stdout.startswith(kind)
    assert done.stderr == ""


def has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def test_sigterm_ends_the_process_that_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the ports, and pull gigabytes for nobody."""
    parent = os.getpid()

    def pull(_: ServeSettings) -> NoReturn:
        os.kill(parent, signal.SIGTERM)
        while True:
            signal.pause()

    monkeypatch.setattr(loading, "open_versions", pull)
    assert not has_children()
    with sigterm_interrupts(), pytest.raises(Terminated):
        open_versions_to_fork(URL)
    assert not has_children()


def out_of_memory(_: ServeSettings) -> NoReturn:
    raise MemoryError("3 GB")


def killed(_: ServeSettings) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("pull", "how", "shown"),
    [
        (out_of_memory, "ended with exit code 1", "MemoryError: 3 GB"),
        (killed, "was ended by SIGKILL", ""),
    ],
)
def test_how_the_process_that_pulls_ended_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    pull: Callable[[ServeSettings], dict[str, ModelVersion]],
    how: str,
    shown: str,
) -> None:
    monkeypatch.setattr(loading, "open_versions", pull)
    with pytest.raises(StoreError, match=f"the process that pulls it {how}"):
        open_versions_to_fork(URL)
    assert shown in capfd.readouterr().err
