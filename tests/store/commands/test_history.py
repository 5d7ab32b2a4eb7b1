"""Tests of `embedserve history`: it shows each change, as text and as JSON."""

import json
import shutil
from pathlib import Path

import pytest
from store.commands.conftest import run


def test_history_shows_the_latest_change_first(
    own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBEDSERVE_BY", "ann")
    shutil.rmtree(own_store / ".history", ignore_errors=True)
    assert run("history", own_store)[:2] == (0, f"history of {own_store}: none\n")
    run("note", own_store, "shop", "1", "recall\nis up \x1b[31m")
    run("alias", own_store, "shop", "stable", "1")
    code, out, _ = run("history", own_store, "shop")
    title, heading, first, second = out.splitlines()
    assert (code, title) == (0, "history of shop")
    assert heading.split() == [
        "when",
        "what",
        "model",
        "versions",
        "who",
        "host",
        "source",
        "detail",
    ]
    assert first.split()[1:5] == ["alias", "shop", "1", "ann"]
    assert "is up" in second
    assert "\x1b" not in out
    code, out, _ = run("history", own_store, "--json", "--last", "1")
    assert (code, json.loads(out)["what"]) == (0, "alias")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_history_of_an_unknown_model_is_an_error(own_store: Path, scheme: str) -> None:
    message = f"embedserve: {scheme}{own_store}: there is no model 'shp'; models are shop"
    assert run("history", f"{scheme}{own_store}", "shp") == (1, "", f"{message}\n")
