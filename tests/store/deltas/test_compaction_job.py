"""Tests of the CronJob in deploy/kubernetes/compact: it compacts, moves the aliases and prunes, and
its compactions can be undone."""

import subprocess
from pathlib import Path

import pytest
import yaml
from forkserver import PYTHON, run_warm
from store.deltas.conftest import line_of, tag_row

from embedserve_store import DeltaWriter, ModelStore, set_alias, undo_deltas
from embedserve_store.errors import StoreError

MANIFEST = Path(__file__).parents[3] / "deploy/kubernetes/compact/cronjob.yaml"


def versions_of_aliases(store: Path) -> dict[str, int | None]:
    return {name: one.version for name, one in ModelStore(store).aliases("m").items()}


def run(store: Path, keep: int) -> None:
    done = run_program(store, keep)
    assert done.returncode == 0, done.stderr


def run_program(store: Path, keep: int) -> subprocess.CompletedProcess[str]:
    job = yaml.safe_load(MANIFEST.read_text())["spec"]["jobTemplate"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["/store", "dlrm"]
    _, *command = container["command"]
    return run_warm([*PYTHON, *command, str(store), "m", str(keep)], timeout=300)


def test_aliases_move_to_the_compacted_version(store: Path, writer: DeltaWriter) -> None:
    def push(row: int) -> None:
        writer.push_rows(tag_row(row, seed=row))

    push(1)
    set_alias(store, "m", "stable", 1)
    set_alias(store, "m", "canary", 1, shadow=20)
    set_alias(store, "m", "kept", 1, at_seq=1)
    push(2)
    run(store, keep=1)
    assert versions_of_aliases(store) == {"canary": 2, "kept": 1, "stable": 2}
    assert ModelStore(store).alias("m", "canary").shadow == 20
    run(store, keep=1)  # without a new delta
    assert ModelStore(store).versions("m") == [1, 2]
    set_alias(store, "m", "kept", None)
    push(3)
    run(store, keep=1)
    assert versions_of_aliases(store) == {"canary": 3, "stable": 3}
    assert ModelStore(store).versions("m") == [3]
    set_alias(store, "m", "stable", 3, at_seq=3)
    push(4)
    run(store, keep=1)  # stable is pinned to a delta
    assert ModelStore(store).versions("m") == [3]


def test_missing_alias_is_reported(store: Path) -> None:
    done = run_program(store, keep=1)
    assert done.returncode == 1
    assert done.stderr == f"{store}/m: no alias stable, whose deltas are compacted\n"


def test_compacted_deltas_are_undone_on_the_previous_version(
    store: Path, writer: DeltaWriter
) -> None:
    """Follows the steps of docs/deltas.md."""

    def kept_seqs(version: int) -> list[int]:
        line = line_of(store, version=version)
        return [one.seq for one in line.deltas_in_state(line.seqs()[-1])]

    set_alias(store, "m", "stable", 1)
    for row in (1, 2, 3):
        writer.push_rows(tag_row(row, seed=row))
    run(store, keep=5)
    assert versions_of_aliases(store) == {"stable": 2}
    set_alias(store, "m", "stable", 1, at_seq=1)
    run(store, keep=5)  # compacts nothing while the alias is pinned
    assert versions_of_aliases(store) == {"stable": 1}
    undo_deltas(store, "m", version="stable", to=1, why="bad")
    set_alias(store, "m", "stable", 1)
    assert kept_seqs(1) == [1]
    with pytest.raises(StoreError, match="reverts to delta 1, but version 2 has the deltas up to"):
        DeltaWriter(store, model="m")
    writer.resume()  # the writer of version 1 continues
    run(store, keep=5)
    assert versions_of_aliases(store) == {"stable": 3}
    with DeltaWriter(store, model="m") as another:
        another.push_rows(tag_row(1))
    assert kept_seqs(3) == [5]
    assert writer.seq == 4
