"""Tests of paths under a folder of another user, which may not be listed or searched."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store.one_table import publish_versions

from embedserve_store.errors import StoreError, UnreachableError
from embedserve_store.local_store import LocalStore
from embedserve_store.model_store import ModelStore
from embedserve_store.remote.remote_store import RemoteStore
from embedserve_store.sources.checkpoint import open_checkpoint

Hide = Callable[[Path], None]


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Hide:
    """Returns a function that makes ``folder`` one which only another user may list or search."""
    stat, listdir = os.stat, os.listdir

    def hide(folder: Path) -> None:
        def check(path: Any) -> None:
            if f"{path}/".startswith(f"{folder}/"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        def stat_others(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if str(path) != str(folder):
                check(path)
            return stat(path, *args, **options)

        def list_others(path: Any) -> list[str]:
            check(path)
            return listdir(path)

        monkeypatch.setattr(os, "stat", stat_others)
        monkeypatch.setattr(os, "listdir", list_others)

    return hide


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
def test_hidden_path_is_named(
    hide: Hide, tmp_path: Path, use: Callable[[Path], object], message: str
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    hide(hidden)
    with pytest.raises(StoreError, match=message):
        use(hidden)


def test_publish_is_done_where_the_history_is_hidden(hide: Hide, tmp_path: Path) -> None:
    publish_versions(tmp_path)
    hide(tmp_path / ".history")
    assert publish_versions(tmp_path).version == 2
    with pytest.raises(UnreachableError, match=r"history/m cannot be read: Permission denied$"):
        ModelStore(tmp_path).history("m")
