"""A process that will fork has another one pull its versions, and learns why it cannot."""

from __future__ import annotations

import pytest
from server.python import run_python

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


FORK = """
import os
import signal
import sys

from embedserve.config import ServeSettings
from embedserve.processes.startup import loading
from embedserve_store.terminal.sigterm import Terminated, sigterm_interrupts

parent, what = os.getpid(), sys.argv[1]

def pull(settings):
    if what == "no memory":
        raise MemoryError("3 GB")
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(parent, signal.SIGTERM)
    while True:
        signal.pause()

loading.open_versions = pull
try:
    with sigterm_interrupts():
        loading.open_versions_to_fork(ServeSettings("file:///nowhere"))
except (Terminated, Exception) as error:
    print(type(error).__name__, error)
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no process is left")
"""


ENDED = "StoreError file:///nowhere: the process that pulls it"


@pytest.mark.parametrize(
    ("what", "how", "shown"),
    [
        ("stopped", "Terminated ", ""),
        ("no memory", f"{ENDED} ended with exit code 1", "MemoryError: 3 GB"),
        ("killed", f"{ENDED} was ended by SIGKILL", ""),
    ],
)
def test_the_process_that_pulls_ends_and_how_is_said(what: str, how: str, shown: str) -> None:
    """SIGTERM to the parent alone would leave it with the ports, and pulling for nobody."""
    done = run_python("-c", FORK, what)
    first, last = done.stdout.splitlines()
    assert first.startswith(how)
    assert last == "no process is left"
    assert shown in done.stderr
