"""Tests of a draft: it has the tables of the checkpoint, marks guesses, and can be read back."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pooled import collection
from store.conftest import small_collection
from torchrec import PoolingType
from unpooled import unpooled_collection

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.publishing.write_expected import expected_of
from embedserve_store.sources import live
from embedserve_store.sources.checkpoint import Checkpoint, from_state_dict
from embedserve_store.sources.description import Description, check_no_draft, read_description
from embedserve_store.sources.description_draft import draft_description
from embedserve_store.sources.rows import TensorRows

USER = {"m.ebc.embedding_bags.user.weight": torch.ones(10, 4)}
WORD = {"m.ec.embeddings.word.weight": torch.ones(6, 8)}


def read_back(text: str, folder: Path) -> Description:
    (folder / "d.yaml").write_text(text)
    return read_description(folder / "d.yaml")


def test_draft_lists_every_table_with_its_shape(tmp_path: Path) -> None:
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


def test_every_guess_in_a_draft_is_marked(tmp_path: Path) -> None:
    lines = draft_description(from_state_dict(USER)).splitlines()
    for key in ("tables", "feature_names", "pooling", "is_weighted"):
        (line,) = [line for line in lines if f"{key}:" in line]
        assert "# check: " in line
    (line,) = [line for line in lines if "embedding_dim:" in line]
    assert "#" not in line


def test_draft_is_rejected_until_no_guess_is_marked(tmp_path: Path) -> None:
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


def test_draft_of_an_embedding_collection_has_no_pooling(tmp_path: Path) -> None:
    text = draft_description(from_state_dict(WORD))
    (table,) = read_back(text, tmp_path).tables
    assert table == TableSpec("word", 6, 8, ("word",), "none", "float32")
    assert "is_weighted" not in text


@pytest.mark.parametrize("name", ["no", "1", "1e3", "null", "2024-01-01", "a-b.c", "_x"])
def test_ambiguous_yaml_table_names_are_quoted(tmp_path: Path, name: str) -> None:
    state = {f"ebc.embedding_bags.{name}.weight": torch.ones(10, 4)}
    (table,) = read_back(draft_description(from_state_dict(state)), tmp_path).tables
    assert (table.name, table.feature_names) == (name, (name,))


@pytest.mark.parametrize(
    "name",
    [
        *("user's", "*clicks", "@x", "[x", "%a", "a: b", "a # b", "no", "1", '"', "a\\b", "é"),
        *("\N{GRINNING FACE}", "\x7f", "\u2028", "\n", " ", "many words " * 20),
    ],
)
def test_ambiguous_yaml_feature_names_are_quoted(tmp_path: Path, name: str) -> None:
    ebc = collection([("t", 20, 4, [name, "other"], PoolingType.SUM)])
    text = draft_description(from_state_dict(state_of(ebc)), expected=expected_of(ebc))
    assert read_back(text, tmp_path).tables == live.describe(ebc)


def test_checkpoint_keys_cannot_inject_lines(tmp_path: Path) -> None:
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
def test_unservable_tables_are_omitted_with_the_reason(
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


def test_table_behind_feature_processors_is_omitted() -> None:
    state = {
        "fp._embedding_bag_collection.embedding_bags.user.weight": torch.ones(10, 4),
        "fp._feature_processors.position_weights.user": torch.ones(5),
    }
    with pytest.raises(InvalidModelError, match=r"fp\._feature_processors beside it changes ids"):
        draft_description(from_state_dict(state))
    text = draft_description(from_state_dict(state | USER), "m")
    assert "left out" not in text


def test_several_collections_need_a_prefix_unless_they_form_one_model(tmp_path: Path) -> None:
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
def test_checkpoint_without_tables_is_rejected(prefix: str) -> None:
    checkpoint: Checkpoint = from_state_dict({"over.weight": torch.ones(4, 4)} | WORD)
    if prefix:
        with pytest.raises(InvalidModelError, match=r"no key under 'm\.ebc' ends in embedding_bag"):
            draft_description(checkpoint, prefix)
    with pytest.raises(InvalidModelError, match=r"state dict: no key ends in .*, of 1 entries"):
        draft_description(from_state_dict({"over.weight": torch.ones(4, 4)}))


def state_of(module: torch.nn.Module, folder: str = "m.ebc") -> dict[str, Any]:
    """Returns the module's state as a checkpoint may have it, in another order."""
    state = module.state_dict()
    return {f"{folder}.{key}": state[key].clone() for key in sorted(state, reverse=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expected_outputs_resolve_every_guess(tmp_path: Path, dtype: torch.dtype) -> None:
    ebc = small_collection().to(dtype)
    text = draft_description(from_state_dict(state_of(ebc)), expected=expected_of(ebc))
    assert "check" not in text
    described = read_back(text, tmp_path)
    assert described.tables == live.describe(ebc)
    check_no_draft(described)


def test_weights_and_unpooled_rows_are_detected_from_expected_outputs(tmp_path: Path) -> None:
    ebc = small_collection(is_weighted=True, pooling="sum")
    described = read_back(
        draft_description(from_state_dict(state_of(ebc)), expected=expected_of(ebc)), tmp_path
    )
    assert (described.is_weighted, described.guesses) == (True, ())
    assert described.tables == live.describe(ebc)
    ec = unpooled_collection([("a", 20, ["x", "y"]), ("b", 20, ["y"])])
    text = draft_description(from_state_dict(state_of(ec, "m.ec")), expected=expected_of(ec))
    assert "check" not in text
    assert read_back(text, tmp_path).tables == live.describe(ec)


def test_guesses_that_outputs_do_not_resolve_stay_marked(tmp_path: Path) -> None:
    ebc = small_collection()
    with torch.no_grad():
        ebc.embedding_bags["tag"].weight.zero_()
    text = draft_description(from_state_dict(state_of(ebc)), expected=expected_of(ebc))
    described = read_back(text, tmp_path)
    marked = [line.partition("# check: ")[2] for line in described.guesses]
    assert marked == ["sum or mean'"]
    assert next(t for t in described.tables if t.name == "tag").feature_names == ("tag", "item")


def test_tables_with_equal_outputs_stay_guesses(tmp_path: Path) -> None:
    ebc = small_collection()
    state = state_of(ebc)
    state["m.ebc.embedding_bags.copy.weight"] = state["m.ebc.embedding_bags.user.weight"]
    text = draft_description(from_state_dict(state), expected=expected_of(ebc))
    assert "tables:  # check: answers are in this order" in text
    described = read_back(text, tmp_path)
    assert {table.name for table in described.tables} == {"user", "item", "tag", "copy"}
    assert len([line for line in described.guesses if "the features" in line]) == 4


def test_table_without_an_output_key_is_omitted(tmp_path: Path) -> None:
    ebc = small_collection()
    more = {"m.ebc.embedding_bags.other.weight": torch.randn(9, 16)}
    text = draft_description(from_state_dict(state_of(ebc) | more), expected=expected_of(ebc))
    assert "# left out: table 'other': no key of the expected answers" in text
    assert read_back(text, tmp_path).tables == live.describe(ebc)


def test_expected_outputs_of_many_tables_need_few_reads_of_each() -> None:
    ebc = collection([(f"t{i}", 9, 4, [f"f{i}"], PoolingType.SUM) for i in range(12)])
    expected, real = expected_of(ebc), TensorRows.gather
    with patch.object(TensorRows, "gather", autospec=True, side_effect=real) as gather:
        text = draft_description(from_state_dict(state_of(ebc)), expected=expected)
    assert "check" not in text
    reads = Counter(id(call.args[0]) for call in gather.call_args_list)
    assert sorted(reads.values()) == [2] * 12


def test_expected_outputs_of_another_model_are_rejected() -> None:
    ebc, expected = small_collection(), expected_of(small_collection())
    state = state_of(ebc)
    state["m.ebc.embedding_bags.item.weight"] += 1
    with pytest.raises(
        InvalidModelError, match=r"^expected: key 'item@item': no table of the check"
    ):
        draft_description(from_state_dict(state), expected=expected)
    state["m.ebc.embedding_bags.item.weight"] = torch.ones(77, 8).double()
    with pytest.raises(InvalidModelError, match=r"no table of .*; left out: .*'item': .* float64"):
        draft_description(from_state_dict(state), expected=expected)
    for change, message in (
        ({"answers": expected.answers[:, :-1]}, r"answers is \[16, 47\], its bags and keys mean"),
        ({"keys": ("z", *expected.keys[1:])}, "key 'z' is of no feature, features are user, fri"),
    ):
        with pytest.raises(InvalidModelError, match=message):
            draft_description(from_state_dict(state_of(ebc)), expected=replace(expected, **change))
