"""Tests of paths under a folder of another user, which may not be listed or searched."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store.one_table import publish_versions

from embedserve_store.errors import StoreError
from embedserve_store.local_store import LocalStore
from embedserve_store.remote.remote_store import RemoteStore
from embedserve_store.sources.checkpoint import open_checkpoint


@pytest.fixture
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, stat, listdir = tmp_path / "hidden", os.stat, os.listdir

    def denied(path: Any) -> PermissionError:
        return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def stat_others(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{folder}/"):
            raise denied(path)
        return stat(path, *args, **options)

    def list_others(path: Any) -> list[str]:
        if str(path) == str(folder):
            raise denied(path)
        return listdir(path)

    folder.mkdir()
    monkeypatch.setattr(os, "stat", stat_others)
    monkeypatch.setattr(os, "listdir", list_others)
    return folder


def pull(folder: Path) -> object:
    publish_versions(folder.parent / "store")
    return RemoteStore(f"file://{folder.parent}/store", folder).load("m")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (pull, r"m/1: pulling failed: Permission denied \(.*hidden"),
        (publish_versions, r"m: publishing failed: Permission denied \(.*hidden"),
        (
            lambda folder: LocalStore(folder).files_beside("m", "aliases"),
            "hidden: the store cannot be read: Perm",
        ),
        (lambda folder: open_checkpoint(folder / "model.pt"), "model.pt: cannot be read: Perm"),
        (
            lambda folder: open_checkpoint(folder / "model.safetensors"),
            "model.safetensors: cannot be read: Permission denied",
        ),
    ],
    ids=["cache", "store", "aliases", "torch_save", "safetensors"],
)
def test_hidden_path_is_named(hidden: Path, use: Callable[[Path], object], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        use(hidden)
