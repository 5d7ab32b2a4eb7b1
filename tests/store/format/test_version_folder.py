"""Tests of the names of version folders, which are numbers."""

from pathlib import Path

from embedserve_store.format.version_folder import version_numbers


def test_only_positive_integers_are_version_folders(tmp_path: Path) -> None:
    for name in ("7", "12", "0", "-1", "08", "9x", ".staging-1", "latest", "٣"):
        (tmp_path / name).mkdir()
    assert version_numbers(tmp_path) == [7, 12]
