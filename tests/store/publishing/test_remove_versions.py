"""Tests of removal: old versions are removed whole, and versions that are needed stay."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from store.listing import everything_under
from store.one_table import publish_versions

from embedserve_store.errors import StoreError, UnreachableError
from embedserve_store.format.alias import Alias
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.remove_versions import prune, remove_version
from embedserve_store.publishing.set_alias import set_alias
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.transfer.stored_version import SMALL_FILE_BYTES_MAX
from embedserve_store.verification import verify

by_delete_and_prune = pytest.mark.parametrize(
    "remove",
    [lambda url: remove_version(url, "m", 1), lambda url: prune(url, "m", 2)],
    ids=["delete", "prune"],
)


@pytest.fixture(params=["folder", "URL"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Returns a store with versions 1 to 5 of "m"."""
    where = f"{tmp_path}/store"
    publish_versions(where, 5)
    return where if request.param == "folder" else f"file://{where}"


def remaining_versions(store: str) -> list[int]:
    return ModelStore(store).versions("m")


def test_prune_keeps_newest_and_aliased_versions(store: str) -> None:
    set_alias(store, "m", "stable", 2)
    set_alias(store, "m", "old", 1)
    set_alias(store, "m", "old", None)
    assert prune(store, "m", 2, is_trial=True) == [1, 3]
    assert remaining_versions(store) == [1, 2, 3, 4, 5]
    assert prune(store, "m", 2) == [1, 3]
    assert remaining_versions(store) == [2, 4, 5]
    assert prune(store, "m", 2) == []
    assert prune(store, "m", 99) == []
    folder = Path(store.removeprefix("file://")) / "m"
    assert {path.name for path in folder.iterdir()} == {"2", "4", "5", "aliases"}


def test_pruned_version_numbers_are_not_reused(store: str) -> None:
    assert prune(store, "m", 1) == [1, 2, 3, 4]
    publish_versions(store)
    assert remaining_versions(store) == [5, 6]


def test_newest_and_aliased_versions_cannot_be_removed(store: str) -> None:
    set_alias(store, "m", "stable", 2)
    for version, message in (
        (5, "m: version 5 is the newest, which stays"),
        (2, "m: version 2 is what alias stable names"),
        (6, r"m: version 6 does not exist; versions are 1, 2, 3, 4, 5"),
    ):
        with pytest.raises(StoreError, match=message):
            remove_version(store, "m", version)
    for keep in (0, -1):
        with pytest.raises(ValueError, match=f"keep is {keep}, expected 1 or more"):
            prune(store, "m", keep)
    with pytest.raises(StoreError, match="other"):
        remove_version(store, "other", 1)
    assert remaining_versions(store) == [1, 2, 3, 4, 5]


def test_removed_version_cannot_be_removed_again(store: str) -> None:
    remove_version(store, "m", 1)
    with pytest.raises(StoreError, match="m: version 1 does not exist; versions are 2, 3, 4, 5"):
        remove_version(store, "m", 1)


def test_version_in_use_is_not_removed(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        publish_versions(tmp_path, value=number)
    opened = ModelStore(tmp_path).load("m", 1)
    before = everything_under(tmp_path)
    with pytest.raises(StoreError, match="m/1: is in use: a server or another process"):
        remove_version(tmp_path, "m", 1)
    assert everything_under(tmp_path) == before
    in_use: list[int] = []
    assert prune(tmp_path, "m", 1, is_trial=True, on_in_use=in_use.append) == [2]
    assert prune(tmp_path, "m", 1, on_in_use=in_use.append) == [2]
    assert in_use == [1, 1]
    assert remaining_versions(str(tmp_path)) == [1, 3]
    assert np.array_equal(opened.tables.rows("t").view("<f4"), np.ones((10, 4), np.float32))
    opened.tables.check_unchanged()
    del opened
    assert prune(tmp_path, "m", 1) == [1]


def test_versions_removed_by_another_process_are_skipped(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    publish_versions(store, 4)
    opened = ModelStore(store).load("m", 1)

    def remove_next(number: int) -> None:
        remove_version(store, "m", number + 1)

    assert prune(store, "m", 1, on_in_use=remove_next) == [3]
    assert ModelStore(store).versions("m") == [1, 4]
    del opened


def test_version_without_a_manifest_is_removed(tmp_path: Path) -> None:
    publish_versions(tmp_path, 2)
    (tmp_path / "m" / "1" / "manifest.json").unlink()
    remove_version(tmp_path, "m", 1)
    assert remaining_versions(str(tmp_path)) == [2]


@pytest.mark.parametrize("name", ["manifest.json", "plan.json"])
def test_version_that_readers_reject_for_its_size_is_removed_unread(
    store: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 3):
        path = Path(store.removeprefix("file://")) / "m" / str(number) / name
        path.chmod(0o600)
        os.truncate(path, SMALL_FILE_BYTES_MAX + 1)
    with pytest.raises(StoreError, match=f"the limit is {SMALL_FILE_BYTES_MAX}"):
        ModelStore(store).stored("m", 1)
    read = RemoteFolder.read
    sizes: list[int] = []

    def read_and_measure(remote: RemoteFolder, path: str, bytes_max: int) -> bytes:
        data = read(remote, path, bytes_max)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(RemoteFolder, "read", read_and_measure)
    remove_version(store, "m", 1)
    assert prune(store, "m", 2) == [2, 3]
    assert remaining_versions(store) == [4, 5]
    assert max(sizes, default=0) < SMALL_FILE_BYTES_MAX


def test_failed_removal_leaves_the_version_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_versions(tmp_path, 2)
    before = everything_under(tmp_path)
    monkeypatch.setattr(os, "rename", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(StoreError, match=r"m/1: cannot be removed: Permission denied"):
        remove_version(tmp_path, "m", 1)
    assert everything_under(tmp_path) == before


def test_version_aliased_during_removal_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_versions(tmp_path, 2)
    rename = os.rename
    named: list[int] = []

    def alias_then_rename(*paths: Path) -> None:
        if not named:
            named.append(set_alias(tmp_path, "m", "stable", 1).change_number)
        rename(*paths)

    monkeypatch.setattr(os, "rename", alias_then_rename)
    with pytest.raises(StoreError, match="m: version 1 is what alias stable names"):
        remove_version(tmp_path, "m", 1)
    assert ModelStore(tmp_path).load("m", "stable").manifest.version == 1


def disconnect_after(removals: int, patch: pytest.MonkeyPatch) -> None:
    """Makes a store behind a URL stop responding after ``removals`` removals of files."""
    done: list[str] = []
    remove = RemoteFolder.remove

    def remove_or_fail(remote: RemoteFolder, name: str) -> None:
        if len(done) == removals:
            raise UnreachableError(f"{name}: cut off")
        done.append(name)
        remove(remote, name)

    patch.setattr(RemoteFolder, "remove", remove_or_fail)


def removals(url: str) -> list[tuple[str, Sequence[int], str]]:
    """Returns the removals in the history, the latest first."""
    events = ModelStore(url).history("m")
    return [(one.what, one.versions, one.who) for one in events if one.what in ("delete", "prune")]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Returns the URL of a store with versions 1 to 3 of "m"."""
    publish_versions(tmp_path, 3)
    return f"file://{tmp_path}"


def test_interrupted_remote_delete_is_recorded_and_can_be_finished(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        disconnect_after(1, patch)
        message = "cut off; version 2 of m is removed, but some of its files are left: delete it"
        with pytest.raises(UnreachableError, match=message):
            remove_version(url, "m", 2, who="ann")
    assert remaining_versions(url) == [1, 3]
    assert removals(url) == [("delete", [2], "ann")]
    assert (tmp_path / "m" / "2" / "tables.safetensors").exists()
    assert prune(url, "m", 2) == []
    assert (tmp_path / "m" / "2" / "tables.safetensors").exists()
    remove_version(url, "m", 2, who="bob")
    assert not (tmp_path / "m" / "2").exists()
    assert removals(url) == [("delete", [2], "bob"), ("delete", [2], "ann")]
    with pytest.raises(StoreError, match="version 2 does not exist; versions are 1, 3"):
        remove_version(url, "m", 2)


def test_prune_leaves_a_version_that_another_process_is_removing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_folder = RemoteFolder.remove_folder

    def begin_next_removal(remote: RemoteFolder, folder: str) -> None:
        (tmp_path / "m" / "2" / "manifest.json").unlink()
        remove_folder(remote, folder)

    monkeypatch.setattr(RemoteFolder, "remove_folder", begin_next_removal)
    assert prune(url, "m", 1, who="ann") == [1]
    assert (tmp_path / "m" / "2" / "tables.safetensors").exists()
    assert removals(url) == [("prune", [1], "ann")]


def test_interrupted_remote_prune_records_the_removed_versions(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = len(RemoteFolder(url).sizes("m/1"))
    disconnect_after(files + 1, monkeypatch)
    with pytest.raises(UnreachableError, match="cut off; version 2 of m is removed"):
        prune(url, "m", 1, who="ann")
    assert remaining_versions(url) == [3]
    assert removals(url) == [("prune", [1, 2], "ann")]


@by_delete_and_prune
def test_version_is_removed_if_the_response_to_the_first_removal_is_lost(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove: Callable[[str], object]
) -> None:
    call = RemoteFolder.remove
    lost: list[str] = []

    def lose_first(remote: RemoteFolder, name: str) -> None:
        call(remote, name)
        if not lost:
            lost.append(name)
            raise UnreachableError(f"{name}: cut off")

    monkeypatch.setattr(RemoteFolder, "remove", lose_first)
    remove(url)
    assert lost == ["m/1/manifest.json"]
    assert not (tmp_path / "m" / "1").exists()
    assert [versions for _, versions, _ in removals(url)] == [[1]]


def test_interrupted_prune_of_a_folder_records_the_removed_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_versions(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, "m", 1, who="ann")
    assert remaining_versions(str(tmp_path)) == [2, 3]
    assert removals(str(tmp_path)) == [("prune", [1], "ann")]


def test_removal_that_removed_no_file_is_not_recorded(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disconnect_after(0, monkeypatch)
    with pytest.raises(UnreachableError, match=r"cut off$"):
        remove_version(url, "m", 2)
    assert (remaining_versions(url), removals(url)) == ([1, 2, 3], [])


def alias_during_removal(url: str, patch: pytest.MonkeyPatch) -> None:
    """Gives version 1 the alias "stable" after a removal has found that it has none."""
    sizes = RemoteFolder.sizes
    named: list[int] = []

    def alias_then_list_sizes(remote: RemoteFolder, folder: str) -> dict[str, int]:
        if folder == "m/1" and not named:
            named.append(set_alias(url, "m", "stable", 1).change_number)
        return sizes(remote, folder)

    patch.setattr(RemoteFolder, "sizes", alias_then_list_sizes)


@by_delete_and_prune
def test_remote_version_aliased_during_removal_is_restored(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove: Callable[[str], object]
) -> None:
    alias_during_removal(url, monkeypatch)
    with pytest.raises(StoreError, match="m: version 1 is what alias stable names"):
        remove(url)
    verify(ModelStore(tmp_path).load("m", "stable"))
    assert (remaining_versions(url), removals(url)) == ([1, 2, 3], [])


def test_version_is_restored_when_aliases_become_unreadable(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aliases = ModelStore.aliases
    calls: list[str] = []

    def read_once(models: ModelStore, model: str) -> dict[str, Alias]:
        calls.append(model)
        if len(calls) > 1:
            raise UnreachableError("cut off")
        return aliases(models, model)

    monkeypatch.setattr(ModelStore, "aliases", read_once)
    with pytest.raises(UnreachableError, match=r"^cut off$"):
        remove_version(url, "m", 1)
    verify(ModelStore(tmp_path).load("m", 1))
    assert removals(url) == []


def test_removal_that_cannot_be_undone_is_recorded(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias_during_removal(url, monkeypatch)
    monkeypatch.setattr(RemoteFolder, "write", Mock(side_effect=UnreachableError("refused")))
    with pytest.raises(UnreachableError, match="refused; version 1 of m is removed, but some"):
        remove_version(url, "m", 1, who="ann")
    assert (remaining_versions(url), removals(url)) == ([2, 3], [("delete", [1], "ann")])
    assert (tmp_path / "m" / "1" / "tables.safetensors").exists()


def test_upload_in_progress_is_not_removed(url: str, tmp_path: Path) -> None:
    upload = tmp_path / "m" / "4" / "tables.safetensors"
    upload.parent.mkdir()
    upload.write_bytes(b"arriving")
    with pytest.raises(StoreError, match="version 4 does not exist; versions are 1, 2, 3"):
        remove_version(url, "m", 4)
    assert upload.exists()


def test_partial_version_with_an_alias_is_not_removed(url: str, tmp_path: Path) -> None:
    set_alias(url, "m", "stable", 1)
    (tmp_path / "m" / "1" / "manifest.json").unlink()
    with pytest.raises(StoreError, match="version 1 is what alias stable names"):
        remove_version(url, "m", 1)
    assert (tmp_path / "m" / "1").exists()
