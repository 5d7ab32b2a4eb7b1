"""Versions appear whole, under numbers that no two publishers share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import embedserve_store
from embedserve_store import staging
from embedserve_store.errors import StoreError
from embedserve_store.staging import (
    RENAME_ATTEMPTS,
    publish_staged,
    staging_folder,
    version_numbers,
)


def publish(model_folder: Path) -> int:
    with staging_folder(model_folder) as folder:
        return publish_staged(
            folder, lambda version: (folder / "n").write_text(str(version)) and None
        )


def test_versions_count_up_from_one(tmp_path: Path) -> None:
    assert [publish(tmp_path / "store" / "m") for _ in range(3)] == [1, 2, 3]
    assert os.listdir(tmp_path / "store" / "m" / "3") == ["n"]


def test_the_highest_number_counts_and_other_names_do_not(tmp_path: Path) -> None:
    for name in ("7", "0", "-1", "08", "9x", ".staging-1", "latest", "٣"):
        (tmp_path / name).mkdir()
    assert version_numbers(tmp_path) == [7]
    assert publish(tmp_path) == 8


def test_a_file_with_a_versions_name_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("mine")
    assert publish(tmp_path) == 2
    assert (tmp_path / "1").read_text() == "mine"


def stale_look(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """The first ``looks`` looks at the folder come too early to see any version."""
    seen = [[]] * looks
    monkeypatch.setattr(
        staging, "version_numbers", lambda folder: seen.pop() if seen else version_numbers(folder)
    )


def test_a_number_taken_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path)
    (tmp_path / "1" / "n").write_text("first")
    stale_look(monkeypatch, 1)
    assert publish(tmp_path) == 2
    assert (tmp_path / "1" / "n").read_text() == "first"
    assert (tmp_path / "2" / "n").read_text() == "2"


def test_publishers_that_always_come_second_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path)
    stale_look(monkeypatch, RENAME_ATTEMPTS)
    with pytest.raises(StoreError, match="took the version number 100 times"):
        publish(tmp_path)
    assert os.listdir(tmp_path) == ["1"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with staging_folder(tmp_path) as folder:
            (folder / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert os.listdir(tmp_path) == []


RACER = """
import sys
from pathlib import Path
from embedserve_store.staging import publish_staged, staging_folder

print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    with staging_folder(Path(sys.argv[1])) as folder:
        (folder / "pid").write_text(sys.argv[2])
        print(publish_staged(folder, lambda n: (folder / "n").write_text(str(n)) and None))
"""


def test_racing_publishers_never_share_a_number(tmp_path: Path) -> None:
    root = str(Path(embedserve_store.__file__).parent.parent)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), str(i)],
            env=os.environ | {"PYTHONPATH": root},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        racer.stdout.readline()
    published: dict[str, int] = {}
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for i, racer in enumerate(racers):
        output, _ = racer.communicate(timeout=60)
        assert racer.returncode == 0
        published |= dict.fromkeys(output.split(), i)
    assert sorted(map(int, published)) == list(range(1, 61))
    for name, i in published.items():
        assert (tmp_path / name / "n").read_text() == name
        assert (tmp_path / name / "pid").read_text() == str(i)
    assert sorted(os.listdir(tmp_path)) == sorted(published)
