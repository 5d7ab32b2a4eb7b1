"""Tests of `embedserve inspect`: the text output for a store, a model and a version."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from store.commands.conftest import error_of, run

from embedserve_store import IdRule, StoreError
from embedserve_store.commands.inspect import compared_lines, describe_ids
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec


def inspect_words(*arguments: str | Path) -> list[list[str]]:
    """Returns the words of each line."""
    code, out, error = run("inspect", *arguments)
    assert code == 0, error
    return [line.split() for line in out.splitlines()]


def test_store_lists_its_models(store: Path) -> None:
    assert ["shop", "1", "1", "7", "112", "B"] in inspect_words(store)


def test_empty_store_is_reported(tmp_path: Path) -> None:
    assert inspect_words(tmp_path)[-1][-2:] == ["no", "models"]


def test_model_lists_its_versions(store: Path) -> None:
    (line,) = [line for line in inspect_words(store, "shop") if line and line[0] == "1"]
    assert line[1:5] == ["1", "7", "112", "B"]
    assert line[-1] == "2"  # ranks


def test_damaged_version_does_not_hide_other_versions(store: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(store, tmp_path / "copied")
    shutil.copytree(store / "shop" / "1", copied / "shop" / "2")
    (copied / "shop" / "2" / "plan.json").unlink()
    for arguments, rows in (((), ["shop", "1,", "2"]), (("shop",), ["2"])):
        lines = inspect_words(copied, *arguments)
        assert rows in lines
        assert any(line[:3] == ["cannot", "be", "opened:"] for line in lines)
    assert ["1", "1", "7", "112", "B"] in [line[:5] for line in inspect_words(copied, "shop")]


def test_version_shows_its_tables_and_the_rows_on_each_rank(store: Path) -> None:
    lines = inspect_words(store, "shop", "1")
    assert ["t_user", "7", "4", "float32", "sum", "112", "B", "user", "rows"] in lines
    where = ["row_wise", "4", "+", "3", "rows"]
    assert ["A", "t_user", "7", "4", "float32", "112", "B", *where] in lines
    held = [line[3:] for line in lines if line[:1] == ["rank"]]
    assert held == [["64", "B", "57.1%", "4"], ["48", "B", "42.9%", "3"]]


def test_version_at_a_url_is_shown_without_download(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert inspect_words(f"file://{store}", "shop", "1") == inspect_words(store, "shop", "1")
    assert not (tmp_path / "cache").exists()


def test_damaged_version_is_named_in_the_error(store: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(store, tmp_path / "copied") / "shop"
    shutil.copytree(copied / "1", copied / "2")
    (copied / "1" / "manifest.json").unlink()
    place = "is of model 'shop' version 1, but lies in the folder of 'shop' version 2"
    for version, message in (
        ("1", "manifest.json: cannot be read: No such file or directory"),
        ("2", f"manifest.json: {place}"),
    ):
        error = error_of("inspect", copied.parent, "shop", version)
        assert f"{copied}/{version}/{message}" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("shop", "2"), "version 2 does not exist; versions are 1"), (("shoes",), "shoes")],
)
def test_missing_model_or_version_is_a_one_line_error(
    store: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in error_of("inspect", store, *arguments)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (IdRule(), "rows"),
        (IdRule(unknown="skip"), "rows, unknown: skip"),
        (IdRule(rule="modulo", modulus=9), "modulo 9"),
        (IdRule(rule="modulo", modulus=9, offset=1), "modulo 9 + 1"),
        (IdRule(rule="map", entries=1000, id_type="string"), "map of 1,000 string"),
    ],
)
def test_id_rule_is_described_in_words(rule: IdRule, words: str) -> None:
    assert describe_ids(rule) == words


def test_version_shows_its_checkpoint_and_metadata(store: Path, tmp_path: Path) -> None:
    files = (store.parent / "model.pt", store.parent / "tables.yaml", tmp_path / "own")
    options = ("--model", "shop", "--meta", "run=8141", "--meta", "note=a = b")
    code, _, error = run("publish", *files, *options)
    assert code == 0, error
    lines = [" ".join(words) for words in inspect_words(tmp_path / "own", "shop", "1")]
    assert f"checkpoint: {store.parent}/model.pt" in lines
    assert {"kind: torch_save", "run: 8141", "note: a = b"} <= set(lines)
    assert (
        "goldens: of the rows, pooled as described: not compared with the training model" in lines
    )
    for wrong, message in (
        (("--meta", "run"), "--meta is 'run', expected KEY=VALUE"),
        (("--meta", "a=1", "--meta", "a=2"), "--meta says 'a' twice"),
    ):
        assert message in error_of("publish", *files, "--model", "shop", *wrong)


def test_escapes_and_markup_in_names_are_printed_literally(store: Path, tmp_path: Path) -> None:
    names = ["clicks[last]", "a[/b]", "\x1b[31m"]
    tables = [{"name": "t_user", "num_embeddings": 7, "embedding_dim": 4, "feature_names": names}]
    (tmp_path / "tables.yaml").write_text(json.dumps({"tables": [tables[0] | {"pooling": "sum"}]}))
    checkpoint = shutil.copy(store.parent / "model.pt", tmp_path / "\x1b[31m.pt")
    files = (checkpoint, tmp_path / "tables.yaml", tmp_path / "own")
    code, _, error = run("publish", *files, "--model", "shop")
    assert code == 0, error
    lines = [" ".join(words) for words in inspect_words(tmp_path / "own", "shop", "1")]
    assert "t_user 7 4 float32 sum 112 B clicks[last], a[/b], \\x1b[31m rows" in lines
    assert f"checkpoint: {tmp_path}/\\x1b[31m.pt" in lines


def test_version_shows_its_comparison_with_the_training_model() -> None:
    table = TableSpec("t", 300, 16, ("history", "candidate"), "mean", "float32")
    compared = {
        "examples": 8,
        "rows": {"t": 78},
        "pooling": {"history": "mean"},
        "unchecked": ["feature 'candidate' has no id"],
    }
    manifest = Manifest("m", 3, (table,), is_weighted=False, source={"compared": compared})
    assert compared_lines(manifest) == [
        "compared with the training model's answers: 8 examples, rows: 78 of 300 of t",
        "pooling compared: history mean",
        "not compared: feature 'candidate' has no id",
    ]
    del compared["pooling"]  # as an older publisher wrote it
    assert len(compared_lines(manifest)) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("yes", "compared is 'yes', expected dict"),
        ({"examples": "8"}, "compared: rows is None, expected dict"),
        ({"rows": {"t": 1}, "unchecked": [], "examples": "8"}, "examples is '8', expected int"),
        ({"rows": {"t": "1"}, "unchecked": [], "examples": 8}, "rows: t is '1', expected int"),
        ({"rows": {}, "unchecked": [7], "examples": 8}, "unchecked has 7, expected strings"),
        ({"rows": {}, "unchecked": [], "examples": 8, "pooling": {"k": 1}}, "pooling: k is 1"),
    ],
)
def test_malformed_comparison_is_an_error(wrong: object, message: str) -> None:
    manifest = Manifest("m", 3, (), is_weighted=False, source={"compared": wrong})
    with pytest.raises(StoreError, match=re.escape(message)) as raised:
        compared_lines(manifest)
    assert str(raised.value).startswith("model m version 3: source")


def test_malformed_metadata_is_an_error(own_store: Path, edit_json: Any) -> None:
    manifest = own_store / "shop" / "1" / "manifest.json"
    edit_json(manifest, lambda data: data["source"].update(meta="x"))
    code, _, error = run("inspect", own_store, "shop", "1")
    problem = "model shop version 1: source: meta is 'x', expected dict"
    assert (code, error) == (1, f"embedserve: {problem}\n")


def test_prune_reports_the_removed_versions(own_store: Path) -> None:
    for arguments, expected in (
        (("--keep", "1", "--dry-run"), "shop: would remove versions: none\n"),
        (("--keep", "1"), "shop: removed versions: none\n"),
    ):
        assert run("prune", own_store, "shop", *arguments) == (0, "", expected)
    assert "there is no model 'shoes'" in error_of("prune", own_store, "shoes", "--keep", "1")
