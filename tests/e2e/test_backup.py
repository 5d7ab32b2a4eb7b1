"""Tests of backup and restore with the page's commands: a restored store is served as before."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from documents import ROOT
from forkserver import PYTHON, run_warm
from running_servers import ANSWER_S_MAX, COMMAND_S_MAX, running
from server.python import run_warm_python
from writable import writable

from embedserve_store import DeltaWriter, ModelStore, add_note, set_alias

PUBLISH = """
import sys, torch
from embedserve_store import TableSpec, publish

tables = [TableSpec("user", 7, 4, ("user",), "sum", "float32")]
for number in range(1, 8):
    state = {"embedding_bags.user.weight": torch.full((7, 4), float(number))}
    publish(state, sys.argv[1], model="dlrm", tables=tables)
"""


def page_commands() -> list[str]:
    """Returns the commands of the page's section, in its order."""
    page = (ROOT / "docs" / "failures.md").read_text("utf-8")
    section = page.partition("## Backup and restore")[2].partition("\n## ")[0]
    found = re.findall(r"`((?:embedserve|cp) [^`]+)`|^ +((?:embedserve|mv) .*)$", section, re.M)
    return [inline or indented for inline, indented in found]


def shell(command: str, folder: Path) -> str:
    """Runs a command in ``folder``, where STORE and COPY are, and returns its output.

    embedserve commands are forked from warm Python.
    """
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = command.replace("MODEL", "dlrm")
    if command.startswith("embedserve "):
        line = [*PYTHON, "-m", *shlex.split(command, comments=True)]
        done = run_warm(line, cwd=folder, timeout=COMMAND_S_MAX)
    else:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
        )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Makes a folder with STORE: seven versions of "dlrm", then a delta, an alias and a note."""
    done = run_warm_python("-c", PUBLISH, tmp_path / "STORE")
    assert done.returncode == 0, done.stderr
    set_alias(tmp_path / "STORE", "dlrm", "stable", 6)
    set_alias(tmp_path / "STORE", "dlrm", "stable", 7, why="recall is up")
    add_note(tmp_path / "STORE", "dlrm", 7, "good")
    with DeltaWriter(tmp_path / "STORE", model="dlrm") as writer:
        writer.push_rows({"user": ([1], np.full((1, 4), 7.5, np.float32))})
    return tmp_path


def test_restored_store_and_version_are_served_again(folder: Path) -> None:
    (
        backup_command,
        prune_command,
        history_command,
        copy_model_command,
        copy_version_command,
        restore_command,
        move_command,
        restore_version_command,
        verify_command,
        restore_deltas_command,
    ) = page_commands()
    assert "7" in shell(backup_command, folder)
    shell(history_command, folder)
    for command in (copy_model_command, copy_version_command):
        assert "there already" in shell(command, folder)
    store = ModelStore(folder / "STORE")
    before = store.alias_history("dlrm", "stable"), store.notes("dlrm", 7), store.history()

    shutil.rmtree(folder / "STORE")
    shell(restore_command, folder)
    shutil.copytree(folder / "COPY" / ".history", folder / "STORE" / ".history", dirs_exist_ok=True)
    after = store.alias_history("dlrm", "stable"), store.notes("dlrm", 7)
    assert after == before[:2]
    assert store.versions("dlrm") == list(range(1, 8))
    events = store.history()
    assert [one for one in events if one.what != "copy"] == before[2]
    assert sum(one.what == "copy" for one in events) >= 7

    rows = writable(folder / "STORE" / "dlrm" / "7") / "tables.safetensors"
    rows.write_bytes(rows.read_bytes()[:-1] + b"x")
    shell(move_command, folder)
    shell(restore_version_command, folder)
    assert "is as it was published" in shell(verify_command, folder)
    (delta,) = (folder / "STORE" / "dlrm" / "deltas" / "7").glob("*.safetensors")
    delta.unlink()
    assert "copied deltas: 1" in shell(restore_deltas_command, folder)
    options = "--model", "dlrm@stable", "--follow", "none", "--deltas", "follow"
    with running(folder / "STORE", folder / "log", *options) as server:
        request = {"features": {"user": [[1]]}, "min_seq": 1}
        answer = httpx.post(f"{server.http}/embed", json=request, timeout=ANSWER_S_MAX)
        assert answer.json()["values"] == [[7.5] * 4]
    shell(prune_command.replace("10", "2"), folder)
    assert ModelStore(folder / "COPY").versions("dlrm") == [6, 7]
