"""The CronJob of deploy/kubernetes/compact compacts, moves the aliases and prunes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml
from store.deltas.conftest import rows

from embedserve_store import DeltaWriter, ModelStore, set_alias

MANIFEST = Path(__file__).parents[3] / "deploy/kubernetes/compact/cronjob.yaml"


def versions_of_aliases(store: Path) -> dict[str, int | None]:
    return {name: one.version for name, one in ModelStore(store).aliases("m").items()}


def run(store: Path, keep: int) -> None:
    job = yaml.safe_load(MANIFEST.read_text())["spec"]["jobTemplate"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["/store", "dlrm"]
    _, *command = container["command"]
    done = subprocess.run(
        [sys.executable, *command, str(store), "m", str(keep)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_aliases_of_the_compacted_version_move(store: Path, writer: DeltaWriter) -> None:
    def push(row: int) -> None:
        writer.push_rows({"tag": ([row], rows("tag", 1, seed=row))})

    push(1)
    set_alias(store, "m", "stable", 1)
    set_alias(store, "m", "canary", 1, shadow=20)
    set_alias(store, "m", "kept", 1, at_seq=1)
    push(2)
    run(store, keep=1)
    assert versions_of_aliases(store) == {"canary": 2, "kept": 1, "stable": 2}
    assert ModelStore(store).alias("m", "canary").shadow == 20
    run(store, keep=1)  # no delta came
    assert ModelStore(store).versions("m") == [1, 2]
    set_alias(store, "m", "kept", None)
    push(3)
    run(store, keep=1)
    assert versions_of_aliases(store) == {"canary": 3, "stable": 3}
    assert ModelStore(store).versions("m") == [3]
    set_alias(store, "m", "stable", 3, at_seq=3)
    push(4)
    run(store, keep=1)  # an alias that is kept at a delta
    assert ModelStore(store).versions("m") == [3]
