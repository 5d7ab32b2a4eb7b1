"""`embedserve verify`: a line a table where all is well, one line and status 1 where not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner
from writable import writable

from embedserve.commands.cli import app


@pytest.fixture
def own_store(store: Path, tmp_path: Path) -> Path:
    """A copy of the store that a test may damage."""
    return writable(shutil.copytree(store, tmp_path / "store"))


def run(*arguments: str | Path) -> tuple[int, str, list[str]]:
    """The exit status, stdout and the lines of stderr."""
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr.splitlines()


def test_a_version_as_published(own_store: Path) -> None:
    for arguments in (("shop",), ("shop", "1")):
        status, _, lines = run(own_store, *arguments)
        assert status == 0
        assert "t_user: 7 rows of 4 float32, 112 B: as published" in lines
        assert lines[-1] == f"shop version 1 is as it was published, in {own_store}/shop/1"


def test_a_flipped_bit_is_one_line_that_names_the_table(own_store: Path) -> None:
    path = own_store / "shop" / "1" / "tables.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    status, stdout, lines = run(own_store, "shop")
    assert (status, stdout) == (1, "")
    assert lines[-1].startswith(f"embedserve: {path}: table 't_user': sha256 is ")


def test_a_store_under_a_url_is_verified_in_the_cache(own_store: Path, tmp_path: Path) -> None:
    status, _, lines = run(f"file://{own_store}", "shop", "--cache", tmp_path / "cache")
    assert status == 0, lines
    assert lines[-1].startswith(f"shop version 1 is as it was published, in {tmp_path}/cache/")


def test_a_store_without_credentials_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    status, stdout, lines = run("s3://bucket/store", "shop", "--cache", tmp_path)
    assert (status, stdout) == (3, "")
    (line,) = lines
    url = "s3://bucket/store/shop"
    assert line.startswith(f"embedserve: no access to the store: {url}: the remote store says: ")
    assert "credentials" in line
