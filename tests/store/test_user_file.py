"""Tests of files that users write: a file too large to be written by hand is rejected before it is
read whole, and so is a repeated key."""

from pathlib import Path
from typing import Any

import pytest

from embedserve_store.errors import InvalidModelError
from embedserve_store.user_file import TEXT_BYTES_MAX, parse_user_file


def test_text_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tables.yaml"
    path.write_text("tables: [Zürich]", encoding="utf-8")
    assert parse_user_file(path) == ("tables: [Zürich]", {"tables": ["Zürich"]})


@pytest.mark.parametrize("name", ["t.yaml", "t.json"])
def test_byte_order_mark_is_skipped(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"x": 1}', encoding="utf-8-sig")
    assert parse_user_file(path) == ('{"x": 1}', {"x": 1})


def test_oversized_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    message = r"model\.pt: cannot be parsed: .*is it a checkpoint\?$"
    with pytest.raises(InvalidModelError, match=message):
        parse_user_file(path)


def test_largest_allowed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    path.write_text("{}" + " " * (TEXT_BYTES_MAX - 2))
    assert parse_user_file(path)[1] == {}


def test_binary_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"\x80\x02")
    message = r"model\.pt: cannot be parsed: no UTF-8 text at byte 0: is it a checkpoint\?$"
    with pytest.raises(InvalidModelError, match=message):
        parse_user_file(path)


BLOCK = """tables:
  - name: user
    pooling: sum
    dtype: int8
    pooling: mean
"""
JOINED = """tables: [{name: a}]
is_weighted: true
tables: [{name: b}]
"""
FLOW = """tables:
  - {name: user, pooling: sum, dtype: int8,
     "pooling": mean}
"""
MERGED = "a: &a {x: 1}\nb: {<<: *a, y: 2, y: 3}"
JSON = '{"tables": [{"name": "user", "pooling": "sum", "pooling": "mean"}]}'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.yaml", BLOCK, "line 5: key 'pooling' is there twice"),
        ("t.yaml", JOINED, "line 3: key 'tables' is there twice"),
        ("t.yaml", FLOW, "line 3: key 'pooling' is there twice"),
        ("t.yaml", MERGED, "line 2: key 'y' is there twice"),
        ("t.yaml", "1: a\n'1': b", "line 2: key '1' is there twice"),
        ("t.yaml", "'1': a\n1: b", "line 2: key 1 is there twice"),
        ("t.yaml", "1: a\n0x1: b", "line 2: key 1 is there twice"),
        ("t.yaml", "yes: a\ntrue: b", "line 2: key True is there twice"),
        ("t.yaml", "'<<': a\n'<<': b", "line 2: key '<<' is there twice"),
        ("t.yaml", "=: a\n=: b", "line 2: key '=' is there twice"),
        ("t.json", JSON, "key 'pooling' is there twice"),
    ],
    ids=[
        "block",
        "joined drafts",
        "flow",
        "beside a merge",
        "quoted",
        "quoted before",
        "hexadecimal",
        "truths",
        "quoted merge",
        "value",
        "JSON",
    ],
)
def test_repeated_key_is_rejected(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidModelError, match=rf"/{name}: cannot be parsed: {message}$"):
        parse_user_file(path)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("{a: &a {x: 1}, b: {<<: *a, x: 2}}", {"a": {"x": 1}, "b": {"x": 2}}),
        (
            "{a: {b: &b {<<: &c {x: 1}, x: 2}}, d: {<<: *b, x: 3}}",
            {"a": {"b": {"x": 2}}, "d": {"x": 3}},
        ),
        (
            "{a: &a {x: 1}, b: &b {y: 2}, c: {<<: *a, <<: *b}}",
            {"a": {"x": 1}, "b": {"y": 2}, "c": {"x": 1, "y": 2}},
        ),
        ("[{x: 1}, {x: 2}]", [{"x": 1}, {"x": 2}]),
        ("{'<<': 1, =: 2, 3: 4}", {"<<": 1, "=": 2, 3: 4}),
    ],
)
def test_merged_keys_may_be_overridden(tmp_path: Path, text: str, parsed: Any) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    assert parse_user_file(path)[1] == parsed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t:\n\tx: 1", r"line 2: found character '\t' that cannot start any token"),
        ("t:\n  - [a", "line 2: expected ',' or ']', but got '<stream end>'"),
    ],
    ids=["tab", "open list"],
)
def test_broken_yaml_is_rejected_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(InvalidModelError) as caught:
        parse_user_file(path)
    assert str(caught.value) == f"{path}: cannot be parsed: {message}"


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        ("!!timestamp x", "timestamp"),
        ("!!int ''", "int"),
        ("!!float ''", "float"),
        ("!!bool x", "bool"),
        ("2001-99-99", "timestamp"),
    ],
)
def test_value_that_is_none_of_its_tag_is_rejected(tmp_path: Path, value: str, tag: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(f"tables:\n  t: {value}\n")
    text = value.split()[-1].strip("'")
    with pytest.raises(
        InvalidModelError, match=rf"cannot be parsed: line 2: '{text}' is no {tag}$"
    ):
        parse_user_file(path)
