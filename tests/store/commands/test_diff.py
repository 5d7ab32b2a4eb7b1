"""Tests of `embedserve diff`: two versions, named in two ways, compared in a table and in
sentences."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from store.commands import conftest
from store.commands.conftest import error_of
from writable import writable

from embedserve_store.commands.diff import parse
from embedserve_store.errors import StoreError
from embedserve_store.format.manifest_checksum import sealed_json
from embedserve_store.local_store import LocalStore


@pytest.fixture
def two_versions(store: Path, tmp_path: Path) -> Path:
    """Returns a store whose version 2 of "shop" has another row 3, twice the old one."""
    for number in ("1", "2"):
        shutil.copytree(store / "shop" / "1", tmp_path / "shop" / number)
    change_row_3(writable(tmp_path / "shop" / "2"))
    return tmp_path


def change_row_3(folder: Path) -> None:
    loaded = LocalStore(folder.parent.parent).load("shop", 1)
    path = folder / "tables.safetensors"
    data = bytearray(path.read_bytes())
    start = len(data) - 112 + 3 * 16
    data[start : start + 16] = (loaded.tables.rows("t_user")[3].view("<f4") * 2).tobytes()
    path.write_bytes(data)
    (table,) = loaded.manifest.tables
    manifest = replace(loaded.manifest, version=2, tables=(replace(table, sha256="changed"),))
    (folder / "manifest.json").write_bytes(sealed_json(manifest.to_json()))


def run(*arguments: str | Path) -> tuple[int, list[list[str]], list[str]]:
    """Returns the exit status, the words of each line of stdout, and the lines of stderr."""
    code, stdout, stderr = conftest.run("diff", *arguments)
    return code, [line.split() for line in stdout.splitlines()], stderr.splitlines()


def test_a_changed_row_is_counted_with_its_drift(two_versions: Path) -> None:
    expected = ["t_user", "7", "1", "14.29%", "1.0000", "1.0000", "3", "1.0000"]
    for names in (
        (two_versions, "shop", "1", "2"),
        (two_versions / "shop" / "1", two_versions / "shop" / "2"),
        (f"file://{two_versions}/shop/1", f"{two_versions}/shop/2/", "--cache", two_versions / "c"),
    ):
        status, lines, errors = run(*names)
        assert status == 0, errors
        assert expected in lines
        assert ["plan:", "the", "same"] in lines


def test_version_does_not_differ_from_itself(two_versions: Path) -> None:
    status, lines, _ = run(two_versions, "shop", "1", "1")
    assert status == 0
    assert ["t_user", "7", "0", "0.00%", "-", "-", "-", "-"] in lines
    assert lines[-1] == ["nothing", "differs"]


def test_versions_are_named_by_arguments_or_by_paths() -> None:
    assert parse(["s", "m", "1", "a"]) == (("s", "m", "1"), ("s", "m", "a"))
    assert parse(["s3://b/s/m/1", "/x/n/stable/"]) == (
        ("s3://b/s", "m", "1"),
        ("/x", "n", "stable"),
    )


@pytest.mark.parametrize("names", [["s/m/1"], ["s", "m", "1"], ["m/1", "m/2"], ["s/m/1", "s/m"]])
def test_incomplete_version_names_are_a_one_line_error(names: list[str]) -> None:
    with pytest.raises(StoreError, match="expected STORE MODEL A B"):
        parse(names)
    error_of("diff", *names)


def test_missing_version_is_a_one_line_error(two_versions: Path) -> None:
    assert error_of("diff", two_versions, "shop", "1", "3") == (
        f"embedserve: {two_versions}/shop: version 3 does not exist; versions are 1, 2\n"
    )


def test_changed_layout_exits_with_status_1(two_versions: Path) -> None:
    folder = two_versions / "shop" / "2"
    manifest = LocalStore(two_versions).load("shop", 2).manifest
    (table,) = manifest.tables
    mean = replace(manifest, tables=(replace(table, pooling="mean"),))
    (folder / "manifest.json").write_bytes(sealed_json(mean.to_json()))
    status, lines, errors = run(two_versions, "shop", "1", "2")
    assert status == 1
    assert not any("embedserve:" in line for line in errors)
    assert " ".join(lines[-2]) == f"layout: key 'user': pooling {table.pooling} to mean"
