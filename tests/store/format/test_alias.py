"""Tests of an alias's file: it names its alias, and a damaged or misplaced file is rejected."""

import json

import pytest

from embedserve_store.errors import StoreError
from embedserve_store.format.alias import Alias, check_name, parse_alias, parse_alias_path
from embedserve_store.format.manifest_checksum import sealed_json

ALIAS = Alias("m", "stable", 3, 7, "kim@trainer", "2026-11-22T16:00:00+00:00", "recall is up")


@pytest.mark.parametrize("version", [7, None])
def test_round_trip(version: int | None) -> None:
    alias = Alias("m", "stable", 3, version, "kim", "2026-11-22T16:00:00+00:00", "")
    assert parse_alias(alias.to_bytes(), "m", "stable", 3, "x") == alias


@pytest.mark.parametrize("name", ["stable", "canary-2", "_x", "a" * 64, "A.b"])
def test_valid_names_are_accepted(name: str) -> None:
    check_name(name)
    assert parse_alias_path(f"{name}/10.json") == (name, 10)


@pytest.mark.parametrize("name", ["", "7", "-a", "a/b", "..", "a b", "a" * 65, "latest", "none"])
def test_invalid_names_are_rejected(name: str) -> None:
    with pytest.raises(StoreError, match="alias name "):
        check_name(name)


@pytest.mark.parametrize(
    "path", ["stable/0.json", "stable/01.json", "stable/1", "stable/.new-1", "1.json", "a/b/1.json"]
)
def test_unrelated_paths_are_not_parsed_as_alias_changes(path: str) -> None:
    assert parse_alias_path(path) is None


@pytest.mark.parametrize("start", range(0, 300, 17))
def test_flipped_bit_is_detected(start: int) -> None:
    data = bytearray(ALIAS.to_bytes())
    data[start % len(data)] ^= 1
    with pytest.raises(StoreError, match=r"^x: "):
        parse_alias(bytes(data), "m", "stable", 3, "x")


@pytest.mark.parametrize(
    ("model", "name", "number"), [("n", "stable", 3), ("m", "canary", 3), ("m", "stable", 4)]
)
def test_change_stored_under_another_alias_is_rejected(model: str, name: str, number: int) -> None:
    with pytest.raises(StoreError, match="x: is change 3 of alias 'stable' of model 'm', but lies"):
        parse_alias(ALIAS.to_bytes(), model, name, number, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 3}, "format_version is 3, this embedserve reads 2"),
        ({"format_version": 1}, "format_version is 1, this embedserve reads 2"),
        ({"version": "7"}, "version is '7', expected int"),
        ({"version": True}, "version is True, expected int"),
        ({"who": None}, "who is None, expected str"),
    ],
)
def test_invalid_fields_are_rejected(change: dict[str, object], message: str) -> None:
    data = sealed_json(json.loads(ALIAS.to_bytes()) | change)
    with pytest.raises(StoreError, match=message):
        parse_alias(data, "m", "stable", 3, "x")


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"7"])
def test_file_that_is_not_an_alias_is_rejected(text: bytes) -> None:
    with pytest.raises(StoreError, match=r"^x: "):
        parse_alias(text, "m", "stable", 3, "x")
