"""Tests of `embedserve note`: inspect shows the notes of a version."""

from pathlib import Path

import pytest
from store.commands.conftest import error_of, run


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_inspect_shows_notes(own_store: Path, scheme: str) -> None:
    store = f"{scheme}{own_store}"
    inspect_arguments = ("inspect", store, "shop", "1")
    assert "note " not in run(*inspect_arguments)[1]
    assert run("note", store, "shop", "1", "recall is up") == (0, "", "shop: note 1 of version 1\n")
    assert run("note", store, "shop", "1", "two\nlines \x1b[31m")[0] == 0
    code, out, _ = run(*inspect_arguments)
    assert code == 0
    first, second = [line for line in out.splitlines() if line.startswith("note ")]
    assert first.endswith(": recall is up")
    assert "@" in first
    assert "two" in second
    assert "\x1b" not in out


def test_note_on_a_missing_version_is_a_one_line_error(own_store: Path) -> None:
    error = error_of("note", own_store, "shop", "2", "x")
    assert "shop: version 2 does not exist; versions are 1" in error
