"""Tests of the history: every change of a store records who, when and from where, in a folder or
behind a URL."""

import logging
import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from store.one_table import STATE, TABLES, publish_versions

from embedserve_store.copying.copy_versions import copy_versions
from embedserve_store.errors import StoreError
from embedserve_store.format import event
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.add_note import add_note
from embedserve_store.publishing.added_file import user
from embedserve_store.publishing.publish import publish
from embedserve_store.publishing.record_event import record_event
from embedserve_store.publishing.remove_versions import prune, remove_version
from embedserve_store.publishing.set_alias import roll_back, set_alias


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_every_store_change_is_recorded_in_the_history(tmp_path: Path, scheme: str) -> None:
    store = f"{scheme}{tmp_path}/store"
    torch.save(STATE, tmp_path / "c.pt")
    publish(tmp_path / "c.pt", store, model="m", tables=TABLES)
    publish_versions(store, 4)
    add_note(store, "m", 1, "bad", who="eve")
    set_alias(store, "m", "stable", 3, why="good")
    set_alias(store, "m", "stable", 4)
    roll_back(store, "m")
    remove_version(store, "m", 1, who="ann")
    prune(store, "m", 1, is_trial=True)
    prune(store, "m", 2)
    copy_versions(store, f"{scheme}{tmp_path}/other", "m", 5)
    copy_versions(store, f"{scheme}{tmp_path}/other", "m", 5)
    events = ModelStore(store).history("m")
    assert [(one.what, tuple(one.versions), one.detail) for one in reversed(events)] == [
        *(("publish", (number,), "") for number in range(1, 6)),
        ("note", (1,), "bad"),
        ("alias", (3,), "stable: good"),
        ("alias", (4,), "stable"),
        ("alias", (3,), "stable"),
        ("delete", (1,), ""),
        ("prune", (2,), ""),
    ]
    assert events[-1].source == str(tmp_path / "c.pt")
    assert [one.who for one in events if one.what in ("note", "delete")] == ["ann", "eve"]
    assert {one.host for one in events} == {socket.gethostname()}
    assert events[0].who == user()
    (copied,) = ModelStore(f"{scheme}{tmp_path}/other").history()
    assert (copied.what, list(copied.versions), copied.source) == ("copy", [5], f"{store}/m")
    assert ModelStore(store).models() == ["m"]


def test_store_without_a_history_has_no_events(tmp_path: Path) -> None:
    publish_versions(tmp_path)
    (tmp_path / event.HISTORY_FOLDER).rename(tmp_path.with_name("away"))
    assert ModelStore(tmp_path).history() == ModelStore(tmp_path).history("m") == []
    with pytest.raises(StoreError, match="none: the store cannot be read"):
        ModelStore(tmp_path / "none").history()
    with pytest.raises(StoreError, match=r"'\.\./m' is not the name of a model"):
        ModelStore(tmp_path).history("../m")


def test_failed_event_write_is_logged_and_the_change_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / event.HISTORY_FOLDER).write_text("in the way")
    with caplog.at_level(logging.WARNING, "embedserve_store"):
        publish_versions(tmp_path)
    assert ModelStore(tmp_path).versions("m") == [1]
    (line,) = [one for one in caplog.messages if "history" in one]
    assert line.startswith("publish of m is done, but missing in the history: ")


def test_event_author_is_taken_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBEDSERVE_BY", "nightly training")
    publish_versions(tmp_path)
    assert [one.who for one in ModelStore(tmp_path).history()] == ["nightly training"]


def test_damaged_event_is_rejected_with_its_file_name(tmp_path: Path) -> None:
    publish_versions(tmp_path)
    (path,) = tmp_path.glob(".history/m/*/*.json")
    path.write_bytes(path.read_bytes().replace(b'"publish"', b'"perhaps"'))
    with pytest.raises(StoreError, match=rf"{path.name}: sha256 is"):
        ModelStore(tmp_path).history()


@pytest.mark.parametrize("version", [True, 1.0, "1"])
def test_event_whose_version_is_no_number_is_rejected(version: object) -> None:
    fields = dict.fromkeys(("what", "model", "who", "when", "host", "source", "detail"), "")
    text = event.Event(versions=[version], **fields).to_bytes()  # type: ignore[list-item]
    with pytest.raises(StoreError, match=r"^e: versions is \[.*\], expected a list of numbers$"):
        event.parse_event(text, "e")


def test_history_limit_reads_only_the_newest_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_versions(tmp_path)
    folder = next(tmp_path.glob(".history/m/*"))
    older = folder.with_name("2020-01-31")
    older.mkdir()
    (older / "not listed").write_text("")
    listdir = Mock(wraps=os.listdir)
    monkeypatch.setattr(os, "listdir", listdir)
    record_event(tmp_path, "note", "m", (1,), detail="x")
    assert [one.detail for one in ModelStore(tmp_path).history("m", 2)] == ["x", ""]
    listed = [str(call.args[0]) for call in listdir.call_args_list]
    assert listed
    assert str(older) not in listed
