"""A draft holds what the checkpoint holds, marks what it guesses, and reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.sources.checkpoint import Checkpoint, from_state_dict
from embedserve_store.sources.description import Description, check_no_draft, read_description
from embedserve_store.sources.description_draft import draft_description

USER = {"m.ebc.embedding_bags.user.weight": torch.ones(10, 4)}
WORD = {"m.ec.embeddings.word.weight": torch.ones(6, 8)}


def read_back(text: str, folder: Path) -> Description:
    (folder / "d.yaml").write_text(text)
    return read_description(folder / "d.yaml")


def test_every_table_with_its_shape(tmp_path: Path) -> None:
    half = {"m.ebc.embedding_bags.item.weight": torch.ones(7, 8).half()}
    wide = {"m.ebc.embedding_bags.tag.weight": torch.ones(5, 12).bfloat16()}
    other = {"m.over.weight": torch.ones(4, 4), "opt.m.ebc.embedding_bags.user.weight.sum": 3}
    text = draft_description(from_state_dict(USER | half | wide | other))
    described = read_back(text, tmp_path)
    assert described.tables == (
        TableSpec("user", 10, 4, ("user",), "sum", "float32"),
        TableSpec("item", 7, 8, ("item",), "sum", "float16"),
        TableSpec("tag", 5, 12, ("tag",), "sum", "float32"),
    )
    assert not described.is_weighted
    assert "prefix m.ebc\n" in text
    assert "# Skipped 2 other entries" in text


def test_every_guess_is_marked(tmp_path: Path) -> None:
    lines = draft_description(from_state_dict(USER)).splitlines()
    for key in ("tables", "feature_names", "pooling", "is_weighted"):
        (line,) = [line for line in lines if f"{key}:" in line]
        assert "# check: " in line
    (line,) = [line for line in lines if "embedding_dim:" in line]
    assert "#" not in line


def test_a_draft_is_one_until_no_guess_is_marked(tmp_path: Path) -> None:
    text = draft_description(from_state_dict(USER))
    described = read_back(text, tmp_path)
    assert len(described.guesses) == 4
    with pytest.raises(InvalidModelError) as caught:
        check_no_draft(described)
    assert str(caught.value).startswith(
        f"{tmp_path}/d.yaml: line 3, 'tables:  # check: answers are in this order' and 3 more: "
        "guessed, and not checked"
    )
    text = text.replace("tables:  # check: answers are in this order", "tables: #check")
    for mark in ("  # check: the features that look up this table", "  # check: sum or mean"):
        text = text.replace(mark, "")
    text = text.replace("# check: true if callers pass weights", "# I have checked this")
    described = read_back(text, tmp_path)
    with pytest.raises(InvalidModelError, match=r"line 3, 'tables: #check': guessed"):
        check_no_draft(described)
    check_no_draft(read_back(text.replace(" #check", ""), tmp_path))


def test_tables_of_an_embedding_collection(tmp_path: Path) -> None:
    text = draft_description(from_state_dict(WORD))
    (table,) = read_back(text, tmp_path).tables
    assert table == TableSpec("word", 6, 8, ("word",), "none", "float32")
    assert "is_weighted" not in text


@pytest.mark.parametrize("name", ["no", "1", "1e3", "null", "2024-01-01", "a-b.c", "_x"])
def test_names_that_yaml_would_read_otherwise(tmp_path: Path, name: str) -> None:
    state = {f"ebc.embedding_bags.{name}.weight": torch.ones(10, 4)}
    (table,) = read_back(draft_description(from_state_dict(state)), tmp_path).tables
    assert (table.name, table.feature_names) == (name, (name,))


def test_keys_cannot_add_lines(tmp_path: Path) -> None:
    key = "m\nis_weighted: true\n.embedding_bags.user.weight"
    text = draft_description(from_state_dict({key: torch.ones(10, 4)}))
    assert not read_back(text, tmp_path).is_weighted
    assert "\nis_weighted: true" not in text


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("narrow", torch.ones(5, 0), "table 'narrow': embedding_dim is 0, expected 1 or more"),
        ("deep", torch.ones(5, 8).double(), "table 'deep': its weight is float64, expected"),
        ("a b", torch.ones(5, 8), "table name 'a b': use letters"),
        ("flat", torch.ones(5), "'flat': m.ebc.embedding_bags.flat.weight is not a plain"),
        ("none", torch.ones(0, 8), "num_embeddings is 0"),
    ],
)
def test_what_cannot_be_served_is_left_out_with_the_reason(
    tmp_path: Path, key: str, value: Any, reason: str
) -> None:
    bad = {f"m.ebc.embedding_bags.{key}.weight": value}
    text = draft_description(from_state_dict(bad | USER))
    (line,) = [line for line in text.splitlines() if line.startswith("# left out: ")]
    assert reason in line
    assert [table.name for table in read_back(text, tmp_path).tables] == ["user"]
    with pytest.raises(InvalidModelError) as caught:
        draft_description(from_state_dict(bad))
    assert reason in str(caught.value)


def test_several_collections_need_a_prefix_unless_they_are_one_model(tmp_path: Path) -> None:
    item = {"n.embedding_bags.item.weight": torch.ones(7, 8)}
    together = draft_description(from_state_dict(USER | item))
    assert len(read_back(together, tmp_path).tables) == 2
    twice = {"n.embedding_bags.user.weight": torch.ones(7, 8)}
    for state in (USER | WORD, USER | twice):
        with pytest.raises(InvalidModelError, match=r"choose one with prefix \(--prefix\)"):
            draft_description(from_state_dict(state))
    text = draft_description(from_state_dict(USER | twice), "n")
    assert read_back(text, tmp_path).tables[0].num_embeddings == 7


@pytest.mark.parametrize("prefix", ["", "m.ebc"])
def test_a_checkpoint_without_tables_is_refused(prefix: str) -> None:
    checkpoint: Checkpoint = from_state_dict({"over.weight": torch.ones(4, 4)} | WORD)
    if prefix:
        with pytest.raises(InvalidModelError, match=r"no key under 'm\.ebc' ends in embedding_bag"):
            draft_description(checkpoint, prefix)
    with pytest.raises(InvalidModelError, match=r"state dict: no key ends in .*, of 1 entries"):
        draft_description(from_state_dict({"over.weight": torch.ones(4, 4)}))
