"""Tests of the rules of ids: they are stored unchanged, and contradictory rules are rejected."""

from dataclasses import replace
from typing import Any

import pytest

from embedserve_store.errors import StoreError
from embedserve_store.format.id_rule import ENTRIES_MAX, IdRule

RULES = (
    IdRule(),
    IdRule(unknown="skip"),
    IdRule(unknown="row", default_row=9),
    IdRule("modulo", modulus=10),
    IdRule("modulo", modulus=7, offset=3),
    IdRule("map", entries=5, sha256="ab"),
    IdRule("map", id_type="string", entries=0, unknown="row"),
    IdRule("map", entries=20, unknown="skip"),
)


@pytest.mark.parametrize("rule", RULES)
def test_valid_rule_passes_the_check_and_round_trips(rule: IdRule) -> None:
    assert IdRule.from_json(rule.to_json(), "w") == rule
    rule.check(10, "w")


def test_rule_of_format_1_gets_the_defaults() -> None:
    assert IdRule.from_json({"rule": "rows"}, "w") == IdRule()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "expected a JSON object"),
        ({}, "rule is None, expected one of rows, modulo, map"),
        ({"rule": "hash"}, "rule is 'hash'"),
        ({"rule": ["map"]}, r"rule is \['map'\]"),
        ({"rule": "rows", "unknown": "error", "shift": 1}, r"has \['rule', 'shift', 'unknown'\]"),
        ({"rule": "rows", "default_row": 1}, r"expected \['rule', 'unknown'\]"),
        ({"rule": "rows", "unknown": "row"}, "expected .*'default_row'"),
        ({"rule": "modulo", "modulus": 3}, "expected .*'offset'"),
        ({"rule": "modulo", "modulus": True, "offset": 0}, "modulus is True, expected int"),
        ({"rule": "modulo", "modulus": 3.0, "offset": 0}, r"modulus is 3\.0, expected int"),
        ({"rule": "modulo", "modulus": 3, "offset": "0"}, "offset is '0', expected int"),
        ({"rule": "rows", "unknown": None}, "unknown is None, expected str"),
        ({"rule": "map"}, "expected .*'sha256'"),
        (RULES[5].to_json() | {"entries": None}, "entries is None, expected int"),
        (RULES[5].to_json() | {"sha256": 3}, "sha256 is 3, expected str"),
    ],
)
def test_invalid_json_rule_is_rejected(data: Any, message: str) -> None:
    with pytest.raises(StoreError, match=f"^w: .*{message}"):
        IdRule.from_json(data, "w")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (IdRule("hash"), "rule is 'hash', expected one of rows, modulo, map"),
        (IdRule(unknown="drop"), "unknown is 'drop', expected one of error, skip, row"),
        (IdRule(unknown="row", default_row=10), "default_row is 10, expected 0 to 9"),
        (IdRule(unknown="row", default_row=-1), "default_row is -1, expected 0 to 9"),
        (IdRule(default_row=1), "default_row is 1, of no use with unknown 'error'"),
        (IdRule(modulus=3), "modulus is 3, of no use with rule 'rows'"),
        (IdRule(id_type="string"), "id_type is 'string', of no use with rule 'rows'"),
        (
            IdRule("modulo", modulus=3, unknown="skip"),
            "unknown is 'skip', of no use with rule 'mod",
        ),
        (IdRule("modulo", modulus=3, default_row=1), "default_row is 1, of no use with rule 'mod"),
        (IdRule("modulo"), "modulus is 0, expected 1 to 10"),
        (IdRule("modulo", modulus=11), "modulus is 11, expected 1 to 10"),
        (IdRule("modulo", modulus=8, offset=3), "offset is 3, expected 0 to 2"),
        (IdRule("modulo", modulus=8, offset=-1), "offset is -1, expected 0 to 2"),
        (IdRule("map", id_type="uuid"), "id_type is 'uuid', expected one of int64, string"),
        (IdRule("map", entries=-1), "entries is -1, expected 0 to"),
        (IdRule("map", entries=True), "entries is True, expected int"),
        (
            IdRule("map", id_type="string", examples=(1,)),  # type: ignore[arg-type]
            r"examples is \[1\], expected strings",
        ),
    ],
)
def test_invalid_rule_for_a_table_of_ten_rows_is_rejected(rule: IdRule, message: str) -> None:
    with pytest.raises(StoreError, match=f"^w: {message}"):
        rule.check(10, "w")


def test_map_rule_is_rejected_for_row_numbers_over_32_bits() -> None:
    IdRule("map").check(ENTRIES_MAX + 1, "w")
    with pytest.raises(StoreError, match="rule is 'map' for a table of 4294967297 rows"):
        IdRule("map").check(ENTRIES_MAX + 2, "w")
    replace(IdRule(), unknown="skip").check(2**40, "w")
