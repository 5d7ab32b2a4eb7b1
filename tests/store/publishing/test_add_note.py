"""Tests of notes: they are stored beside a version, in order, and do not change it."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
from store.listing import everything_under
from store.one_table import publish_versions

from embedserve_store.errors import StoreError
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.add_note import add_note
from embedserve_store.publishing.remove_versions import remove_version
from embedserve_store.publishing.set_alias import set_alias


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a store with versions 1 and 2 of "m"."""
    publish_versions(tmp_path / "store", 2)
    return tmp_path / "store"


@pytest.fixture(params=["", "file://"])
def store(request: pytest.FixtureRequest, folder: Path) -> str:
    return f"{request.param}{folder}"


def test_notes_are_stored_with_author_and_time(store: str, folder: Path) -> None:
    before = everything_under(folder / "m" / "1"), everything_under(folder / "m" / "2")
    set_alias(store, "m", "stable", 1)
    first = add_note(store, "m", "stable", "recall is up")
    second = add_note(store, "m", 1, "and down again: ünïcode\nand lines", who="kim")
    other = add_note(store, "m", "2", "never served")
    models = ModelStore(store)
    assert models.notes("m", 1) == [first, second]
    assert models.notes("m", 2) == [other]
    assert [one.number for one in (first, second, other)] == [1, 2, 1]
    assert "@" in first.who
    assert second.who == "kim"
    assert datetime.fromisoformat(first.when).tzinfo is not None
    assert (everything_under(folder / "m" / "1"), everything_under(folder / "m" / "2")) == before
    assert (models.versions("m"), models.models()) == ([1, 2], ["m"])
    set_alias(store, "m", "stable", 2)
    remove_version(store, "m", 1)
    assert models.notes("m", 1) == [first, second]


def test_stray_files_are_not_listed_as_notes(folder: Path) -> None:
    add_note(folder, "m", 2, "x")
    assert ModelStore(folder).notes("m", 1) == []
    (folder / "m" / "notes" / "2" / ".new-1").touch()
    (folder / "m" / "notes" / "x").mkdir()
    assert len(ModelStore(folder).notes("m", 2)) == 1


def test_concurrent_notes_are_all_stored(folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: add_note(folder, "m", 1, f"note {i}"), range(40)))
    notes = ModelStore(folder).notes("m", 1)
    assert [one.number for one in notes] == list(range(1, 41))
    assert {one.text for one in notes} == {f"note {i}" for i in range(40)}
    assert [name for name in os.listdir(folder / "m" / "notes" / "1") if name[0] == "."] == []


@pytest.mark.parametrize(
    ("model", "version", "text", "message"),
    [
        ("m", 3, "x", r"m: version 3 does not exist; versions are 1, 2"),
        ("m", "best", "x", "'best' is no version and no alias"),
        ("n", 1, "x", "there is no model 'n'; models are "),
        ("m", 1, " \n", "text is empty"),
        ("m", 1, "x" * 1001, "text has 1001 characters, the limit is 1000"),
    ],
)
def test_invalid_note_leaves_the_store_unchanged(
    folder: Path, model: str, version: int | str, text: str, message: str
) -> None:
    before = everything_under(folder)
    with pytest.raises(StoreError, match=message):
        add_note(folder, model, version, text)
    assert everything_under(folder) == before


def test_modified_note_is_rejected(folder: Path) -> None:
    add_note(folder, "m", 1, "up")
    path = folder / "m" / "notes" / "1" / "1.json"
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"up"', b'"no"'))
    with pytest.raises(StoreError, match=r"notes/1/1\.json: sha256 is .* changed since"):
        ModelStore(folder).notes("m", 1)
    path.write_bytes(text)
    path.rename(path.with_name("2.json"))
    with pytest.raises(StoreError, match=r"is note 1 of .* version 1, but lies where note 2"):
        ModelStore(folder).notes("m", 1)
    path.with_name("2.json").write_bytes(b"[]")
    with pytest.raises(StoreError, match=r"2\.json: format_version is None, this embedserve reads"):
        ModelStore(folder).notes("m", 1)
