"""Tests of opening a folder: an unreadable folder is distinguished from a damaged one."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from server.small_store import publish_small_model

from embedserve.processes.open_store import open_folder
from embedserve_store import StoreError
from embedserve_store.errors import UnreachableError
from embedserve_store.local_store import LocalStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return publish_small_model(tmp_path) / "shop" / "1"


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "tables.safetensors"])
def test_unreadable_file_raises_unreachable_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stat = Path.stat

    def fail(path: Path, **kwargs: Any) -> os.stat_result:
        if path.name == name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(path, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", fail)
        with pytest.raises(UnreachableError, match=f"{name}: cannot be read"):
            open_folder(str(folder))
    assert open_folder(str(folder)).manifest.version == 1


def test_other_file_system_errors_raise_unreachable_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(LocalStore, "load", fail)
    with pytest.raises(UnreachableError, match=r"shop/1: .*Too many open files"):
        open_folder(str(folder))


@pytest.mark.parametrize("name", ["plan.json", "tables.safetensors"])
def test_damaged_or_missing_file_raises_store_error(folder: Path, name: str) -> None:
    folder.chmod(0o755)
    (folder / name).chmod(0o644)
    (folder / name).write_bytes(b"damaged")
    with pytest.raises(StoreError, match=name) as damaged:
        open_folder(str(folder))
    (folder / name).unlink()
    with pytest.raises(StoreError, match=name) as missing:
        open_folder(str(folder))
    for caught in (damaged, missing):
        assert not isinstance(caught.value, UnreachableError)
