"""Tests of SIGTERM: it ends publish and demo as Ctrl-C does, with one line and no files left in the
store."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server.python import run_warm_python

from embedserve_store.terminal.sigterm import sigterm_interrupts

KILLED_AT_FIRST_PROGRESS = """
import contextlib, os, signal, sys
import torch
from embedserve.commands.cli import app
from embedserve_store.commands import demo, publish

@contextlib.contextmanager
def killed(*_):
    yield lambda *call: os.kill(os.getpid(), signal.SIGTERM)

os.chdir(sys.argv.pop(1))
demo.step_progress = publish.table_progress = killed
torch.save({"embedding_bags.t.weight": torch.ones(7, 4)}, "model.pt")
app(sys.argv[1:])
"""
TABLES = """
tables:
- {name: t, num_embeddings: 7, embedding_dim: 4, feature_names: [t], pooling: sum}
"""


def test_sigterm_interrupts_only_inside_the_context_manager() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


PUBLISH = "publish model.pt tables.yaml store --model m"
DEMO = "demo store"

KilledCommand = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KilledCommand]:
    """Runs both commands concurrently; returns the folder and the outcome of each."""

    def run(arguments: str) -> KilledCommand:
        folder = tmp_path_factory.mktemp("killed")
        (folder / "tables.yaml").write_text(TABLES)
        return folder, run_warm_python("-c", KILLED_AT_FIRST_PROGRESS, folder, *arguments.split())

    commands = (PUBLISH, DEMO)
    with ThreadPoolExecutor() as pool:
        return dict(zip(commands, pool.map(run, commands), strict=True))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (PUBLISH, 1, "m: publishing was interrupted"),
        (DEMO, 130, "embedserve: interrupted"),
    ],
)
def test_publish_and_demo_clean_up_after_sigterm(
    killed: dict[str, KilledCommand], arguments: str, status: int, message: str
) -> None:
    folder, done = killed[arguments]
    assert done.returncode == status, done.stderr
    assert done.stderr.splitlines()[-1].endswith(message)
    assert not (folder / "store").exists() or os.listdir(folder / "store") == []
