"""SIGTERM ends publish and demo as Ctrl-C does: one line, and nothing left in the store."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from server.python import run_python

from embedserve.terminal.sigterm import sigterm_interrupts

KILLED_AT_FIRST_PROGRESS = """
import contextlib, os, signal, sys
import torch
from embedserve.commands.cli import app
from embedserve.commands import demo, publish

@contextlib.contextmanager
def killed(*_):
    yield lambda *call: os.kill(os.getpid(), signal.SIGTERM)

demo.step_progress = publish.table_progress = killed
torch.save({"embedding_bags.t.weight": torch.ones(7, 4)}, "model.pt")
app(sys.argv[1:])
"""
TABLES = """
tables:
- {name: t, num_embeddings: 7, embedding_dim: 4, feature_names: [t], pooling: sum}
"""


def test_it_interrupts_within_and_not_after() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("publish model.pt tables.yaml store --model m", 1, "m: publishing was interrupted"),
        ("demo store", 130, "embedserve: interrupted"),
    ],
)
def test_commands_clean_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    status: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tables.yaml").write_text(TABLES)
    done = run_python("-c", KILLED_AT_FIRST_PROGRESS, *arguments.split())
    assert done.returncode == status, done.stderr
    assert done.stderr.splitlines()[-1].endswith(message)
    assert not Path("store").exists() or os.listdir("store") == []
