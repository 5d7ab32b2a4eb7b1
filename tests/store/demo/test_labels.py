"""Tests of the titles of the demo's movies: their ids are in its tables, and a server can read the
file."""

import json
import resource
from pathlib import Path

import pytest

from embedserve_store.demo.data import load
from embedserve_store.demo.labels import TABLE, labels_path, titles, write_labels
from embedserve_store.demo.vocabularies import RULES
from embedserve_store.errors import StoreError


def test_every_title_belongs_to_a_movie_of_the_data_set() -> None:
    found = titles()
    assert found["1375666"] == "Inception"
    assert {int(one) for one in found} <= load().movie_rows.keys()
    assert len(set(found.values())) == len(found) > 200
    assert all(title == title.strip() and title for title in found.values())


def test_labels_are_written_next_to_the_model(tmp_path: Path) -> None:
    write_labels(tmp_path, "films")
    written = json.loads(labels_path(tmp_path, "films").read_text("utf-8"))
    assert written == {"films": {TABLE: titles()}}
    assert TABLE in RULES


def test_full_disk_leaves_no_labels(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StoreError, match=r"films\.labels\.json: cannot be written: File too"):
            write_labels(tmp_path, "films")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not labels_path(tmp_path, "films").exists()


@pytest.mark.parametrize("store", ["nowhere", "file"])
def test_unwritable_file_is_named_in_the_error(tmp_path: Path, store: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=rf"{store}/films\.labels\.json: cannot be written"):
        write_labels(tmp_path / store, "films")
