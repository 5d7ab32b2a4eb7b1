"""Compares the layouts of models: the properties that callers and their rankers depend on.

The layout has the keys of a response with their order, widths, tables and poolings. It has the id
rule of each feature, and whether requests carry weights. Rows, dtypes, vocabularies and plans do
not belong to it, because retraining changes them while the layout stays.
"""

from __future__ import annotations

from collections.abc import Iterator

from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.manifest import Manifest

_OF_A_VOCABULARY = ("entries", "sha256", "examples")


def layout_changes(before: Manifest, after: Manifest) -> tuple[str, ...]:
    """Returns the readable differences between two layouts, a line each; none if they are equal."""
    return (*_keys(before, after), *_features(before, after))


def _keys(before: Manifest, after: Manifest) -> Iterator[str]:
    old = {one.key: one.table for one in before.columns}
    new = {one.key: one.table for one in after.columns}
    for key in old:
        if key not in new:
            yield f"key {key!r} is gone"
    for key in new:
        if key not in old:
            yield f"key {key!r} is new"
    old_order = [key for key in old if key in new]
    new_order = [key for key in new if key in old]
    for i, (was, is_now) in enumerate(zip(old_order, new_order, strict=True)):
        if was != is_now:
            yield f"the keys are in another order: from {i} on {was!r} to {is_now!r}"
            break
    for key in new_order:
        a, b = old[key], new[key]
        if a.name != b.name:
            yield f"key {key!r}: table {a.name} to {b.name}"
        if a.embedding_dim != b.embedding_dim:
            yield f"key {key!r}: dim {a.embedding_dim} to {b.embedding_dim}"
        if a.pooling != b.pooling:
            yield f"key {key!r}: pooling {a.pooling} to {b.pooling}"


def _features(before: Manifest, after: Manifest) -> Iterator[str]:
    old, new = _rules(before), _rules(after)
    for feature, is_now in new.items():
        was = old.get(feature, is_now)
        if was != is_now:
            yield f"feature {feature!r}: ids {was} to {is_now}"
    if before.is_weighted != after.is_weighted:
        yield "takes weights now" if after.is_weighted else "takes no weights any more"


def _rules(manifest: Manifest) -> dict[str, str]:
    """Returns the id rule of each feature, in words."""
    rules = zip(manifest.rule_per_feature, manifest.rows_per_feature, strict=True)
    return dict(zip(manifest.features, (_describe(*one) for one in rules), strict=True))


def _describe(rule: IdRule, rows: int) -> str:
    """Describes a rule without its vocabulary, such as "map int64 unknown skip"."""
    data = {key: value for key, value in rule.to_json().items() if key not in _OF_A_VOCABULARY}
    if rule.rule == "modulo" and rule.modulus == rows - rule.offset:
        data["modulus"] = "all rows"  # a larger table with the same rule has an equal layout
    shown = [data.pop("rule")]
    for key, value in data.items():
        value = f"{value:,}" if isinstance(value, int) else value
        shown.append(value if key == "id_type" else f"{key} {value}")
    return " ".join(shown)
