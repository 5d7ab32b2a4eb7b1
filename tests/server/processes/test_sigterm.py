"""Tests of SIGTERM: it ends commands as Ctrl-C does, with one line and nothing half done."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from server.python import run_python, run_warm_python

from embedserve.processes.sigterm import sigterm_interrupts
from embedserve_store import ModelStore, TableSpec, publish

KILLED_AT_FIRST_PROGRESS = """
import contextlib, os, signal, sys
import torch
from embedserve.__main__ import main
from embedserve_store.commands import demo, publish

@contextlib.contextmanager
def killed(*_):
    yield lambda *call: os.kill(os.getpid(), signal.SIGTERM)

os.chdir(sys.argv.pop(1))
demo.step_progress = publish.table_progress = killed
torch.save({"embedding_bags.t.weight": torch.ones(7, 4)}, "model.pt")
main()
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


KILLED_WHILE_IT_DELETES = """
import os, shutil, signal
from embedserve.__main__ import main

shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
main()
"""


def test_interrupt_during_the_imports_of_the_command_line_prints_no_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "from embedserve.__main__ import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'embedserve.commands.cli':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()\n"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_prune_records_the_removed_versions_after_sigterm(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        rows = {"embedding_bags.t.weight": torch.full((7, 4), value)}
        publish(rows, tmp_path, model="m", tables=[TableSpec("t", 7, 4, ("t",), "sum", "float32")])
    command = ("prune", tmp_path, "m", "--keep", "1")
    done = run_warm_python("-c", KILLED_WHILE_IT_DELETES, *command)
    assert (done.returncode, done.stderr) == (130, "embedserve: interrupted\n")
    events = ModelStore(tmp_path).history("m")
    assert [(one.what, *one.versions) for one in events] == [
        ("prune", 1),
        ("publish", 2),
        ("publish", 1),
    ]


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


@pytest.mark.parametrize("arguments", [PUBLISH, DEMO])
def test_publish_and_demo_clean_up_after_sigterm(
    killed: dict[str, KilledCommand], arguments: str
) -> None:
    folder, done = killed[arguments]
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "embedserve: interrupted"
    assert not (folder / "store").exists() or os.listdir(folder / "store") == []
