"""Tests of layout changes: the differences between two versions of a model that its callers would
notice."""

from dataclasses import replace

import pytest

from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.layout import layout_changes
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec

USER = TableSpec("user", 30, 8, ("user", "friend"), "sum", "float32")
ITEM = TableSpec("item", 20, 4, ("item",), "mean", "float32")
TAG = TableSpec("tag", 10, 4, ("tag",), "sum", "float32")


def manifest_of(*tables: TableSpec, is_weighted: bool = False) -> Manifest:
    return Manifest("m", 1, tables, is_weighted)


BEFORE = manifest_of(USER, ITEM)


@pytest.mark.parametrize(
    ("after", "changes"),
    [
        (manifest_of(USER, ITEM, TAG), ["key 'tag' is new"]),
        (manifest_of(ITEM), ["key 'user' is gone", "key 'friend' is gone"]),
        (
            manifest_of(ITEM, USER),
            ["the keys are in another order: from 0 on 'user' to 'item'"],
        ),
        (
            manifest_of(replace(USER, feature_names=("friend", "user")), TAG, ITEM),
            ["key 'tag' is new", "the keys are in another order: from 0 on 'user' to 'friend'"],
        ),
        (
            manifest_of(replace(USER, name="person"), ITEM),
            ["key 'user': table user to person", "key 'friend': table user to person"],
        ),
        (manifest_of(USER, replace(ITEM, embedding_dim=8)), ["key 'item': dim 4 to 8"]),
        (manifest_of(USER, replace(ITEM, pooling="sum")), ["key 'item': pooling mean to sum"]),
        (
            manifest_of(USER, replace(ITEM, ids=IdRule("modulo", modulus=20))),
            ["feature 'item': ids rows unknown error to modulo modulus all rows offset 0"],
        ),
        (
            manifest_of(USER, replace(ITEM, ids=IdRule("map", id_type="string", unknown="skip"))),
            ["feature 'item': ids rows unknown error to map string unknown skip"],
        ),
        (manifest_of(USER, ITEM, is_weighted=True), ["takes weights now"]),
    ],
)
def test_changes_visible_to_callers_are_reported(after: Manifest, changes: list[str]) -> None:
    assert list(layout_changes(BEFORE, after)) == changes
    assert layout_changes(after, BEFORE)


def test_retrained_model_has_the_same_layout() -> None:
    again = replace(ITEM, num_embeddings=25, dtype="int8", sha256="other")
    assert layout_changes(BEFORE, manifest_of(USER, again)) == ()
    hashed = [
        replace(ITEM, num_embeddings=rows, ids=IdRule("modulo", modulus=rows - 2, offset=2))
        for rows in (20, 25)
    ]
    assert layout_changes(manifest_of(USER, hashed[0]), manifest_of(USER, hashed[1])) == ()
    words = IdRule("map", id_type="string", entries=5, sha256="a", examples=("x",))
    more = replace(words, entries=6, sha256="b", examples=("y",))
    before, after = (manifest_of(replace(USER, ids=ids)) for ids in (words, more))
    assert layout_changes(before, after) == ()


def test_removed_weights_are_a_layout_change() -> None:
    assert layout_changes(manifest_of(USER, is_weighted=True), manifest_of(USER)) == (
        "takes no weights any more",
    )
