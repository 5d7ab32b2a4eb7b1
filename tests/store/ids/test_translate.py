"""Tests of translation: the ids of a batch become rows, each feature by its rule, as single ids
would."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.id_map import IdMap, open_id_maps, write_id_maps
from embedserve_store.ids.translate import IdTranslator

MAPPED = {"shop": {-5: 3, 0: 0, 2**63 - 1: 9}, "movie": {7: 1, -5: 2, 8: 1}, "void": {}}


def table(name: str, rows: int, rule: IdRule, *features: str) -> TableSpec:
    return TableSpec(name, rows, 4, features or (name,), "sum", "float32", ids=rule)


TABLES = (
    table("user", 10, IdRule(), "user", "friend"),
    table("shop", 10, IdRule("map", entries=3)),
    table("page", 8, IdRule("modulo", modulus=5, offset=2)),
    table("movie", 4, IdRule("map", entries=3, unknown="row", default_row=3), "movie", "seen"),
    table("tag", 6, IdRule(unknown="row", default_row=5)),
    table("city", 6, IdRule(unknown="skip"), "city", "home"),
    table("town", 4, IdRule(unknown="skip"), "home"),
    table("void", 1, IdRule("map", id_type="string", unknown="skip")),
    table("day", 7, IdRule("modulo", modulus=7)),
)
MANIFEST = Manifest("m", 1, TABLES, is_weighted=False)
FEATURES = len(MANIFEST.features)


def built_maps() -> dict[str, IdMap]:
    return {
        name: IdMap.build(np.array([*rows], np.int64), np.array([*rows.values()], np.int64), name)
        for name, rows in MAPPED.items()
    }


@pytest.fixture(scope="module")
def translators(tmp_path_factory: pytest.TempPathFactory) -> tuple[IdTranslator, IdTranslator]:
    """Returns two translators: one with maps in memory, as at publish, and one with maps of a file,
    as served."""
    path = tmp_path_factory.mktemp("maps") / "ids.safetensors"
    write_id_maps(path, built_maps())
    return IdTranslator(MANIFEST, built_maps()), IdTranslator(MANIFEST, open_id_maps(path, TABLES))


def row_alone(feature: int, one: int) -> int | None:
    rule, limit = MANIFEST.rule_per_feature[feature], MANIFEST.rows_per_feature[feature]
    if rule.rule == "modulo":
        return one % rule.modulus + rule.offset
    if rule.rule == "map":
        return MAPPED[MANIFEST.features[feature].replace("seen", "movie")].get(one)
    return one if 0 <= one < limit else None


ID = st.integers(-(2**63), 2**63 - 1) | st.integers(-6, 12) | st.just(2**63 - 1)


@settings(max_examples=150)
@given(st.lists(st.lists(ID, max_size=6), min_size=FEATURES, max_size=FEATURES))
def test_batch_translation_equals_translation_of_single_ids(
    translators: tuple[IdTranslator, IdTranslator], bags: list[list[int]]
) -> None:
    ids = np.array([one for bag in bags for one in bag], np.int64)
    before = ids.copy()
    alone = [row_alone(feature, one) for feature, bag in enumerate(bags) for one in bag]
    rules = [MANIFEST.rule_per_feature[f] for f, bag in enumerate(bags) for _ in bag]
    expected = [
        (rule.default_row if rule.unknown == "row" else 0) if row is None else row
        for row, rule in zip(alone, rules, strict=True)
    ]
    for dtype in (np.int64, np.int32):
        counts = np.array([len(bag) for bag in bags], dtype)
        for translator in translators:
            translation = translator.translate(ids, counts)
            assert translation.rows.dtype == np.int64
            assert translation.rows.tolist() == expected
            unknown = [row is None for row in alone]
            if not any(unknown):
                assert translation.unknown is None
            else:
                assert translation.unknown is not None
                assert translation.unknown.tolist() == unknown
    np.testing.assert_array_equal(ids, before)


def test_translator_lists_unknown_id_policy_and_id_type_per_feature(
    translators: tuple[IdTranslator, IdTranslator],
) -> None:
    for translator in translators:
        policies = dict(zip(MANIFEST.features, translator.unknown_per_feature, strict=True))
        assert policies == {
            "user": "error",
            "friend": "error",
            "shop": "error",
            "page": "error",
            "movie": "row",
            "seen": "row",
            "tag": "row",
            "city": "skip",
            "home": "skip",
            "void": "skip",
            "day": "error",
        }
        strings = [translator.id_types[MANIFEST.features.index(name)] for name in ("void", "user")]
        assert strings == ["string", "int64"]
        assert translator.limits.dtype == np.uint64
        assert tuple(translator.limits.tolist()) == MANIFEST.rows_per_feature


@pytest.mark.parametrize(
    ("rule", "is_identity"),
    [
        (IdRule(), True),
        (IdRule(unknown="skip"), False),
        (IdRule("modulo", modulus=3), False),
    ],
)
def test_only_default_id_rule_is_identity(rule: IdRule, is_identity: bool) -> None:
    tables = (table("a", 5, IdRule()), table("b", 5, rule))
    assert IdTranslator(Manifest("m", 1, tables, False), {}).is_identity is is_identity


def test_mapped_row_beyond_the_table_is_unknown() -> None:
    # Opening does not read the maps, so a damaged map must not make a kernel read out of bounds.
    tables = (table("movie", 4, IdRule("map", entries=2)),)
    maps = {"movie": IdMap.build(np.array([7, 8]), np.array([3, 4]), "movie")}
    translation = IdTranslator(Manifest("m", 1, tables, False), maps).translate(
        np.array([7, 8]), np.array([2])
    )
    assert translation.rows.tolist() == [3, 0]
    assert translation.unknown is not None
    assert translation.unknown.tolist() == [False, True]


def test_tables_of_a_shared_feature_use_the_same_map(tmp_path: Path) -> None:
    rule = IdRule("map", entries=2)
    tables = (table("a", 4, rule, "x"), table("b", 4, rule, "x", "y"))
    one = IdMap.build(np.array([70, 80]), np.array([3, 1]), "a")
    translator = IdTranslator(Manifest("m", 1, tables, False), {"a": one, "b": one})
    assert translator.translate(np.array([80, 70, 70]), np.array([1, 2])).rows.tolist() == [1, 3, 3]
