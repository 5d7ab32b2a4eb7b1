"""Hypothesis strategies of requests to the fake engine's model, and of JSON values."""

from typing import Any

from hypothesis import strategies as st
from server.fake_engine import FEATURES, Bags, Weights
from server.fake_models import VOCABULARIES, ruled_info

from embedserve.model_info import ModelInfo
from embedserve_store.format.table_spec import TableSpec

WEIGHT = st.floats(-100, 100, width=32)
JSON_LEAF = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from([2**63, -(2**63) - 1, 10**400, 1e39, "", "features"])
)
JSON_VALUE = st.recursive(
    JSON_LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@st.composite
def bags_of_ids(draw: st.DrawFn, *, all_features: bool = False) -> Bags:
    """Draws some or all features in any order, with 1 to 4 examples and some empty bags."""
    features = draw(st.permutations(list(FEATURES)))
    if not all_features:
        features = features[: draw(st.integers(1, len(features)))]
    batch_size = draw(st.integers(1, 4))
    return {
        feature: [
            draw(st.lists(st.integers(0, FEATURES[feature][0] - 1), max_size=3))
            for _ in range(batch_size)
        ]
        for feature in features
    }


@st.composite
def bags_of(draw: st.DrawFn, model: ModelInfo) -> Bags:
    """Draws some features of ``model`` in any order, with known and unknown ids that its rules
    accept."""
    tables = {feature: table for table in model.tables for feature in table.feature_names}
    features = draw(st.permutations(list(tables)))
    batch_size = draw(st.integers(1, 4))
    return {
        feature: [draw(st.lists(ids_of(tables[feature]), max_size=4)) for _ in range(batch_size)]
        for feature in features[: draw(st.integers(1, len(features)))]
    }


def ids_of(table: TableSpec) -> st.SearchStrategy[Any]:
    """Draws ids that a request may have; ids of a map are mostly known."""
    int64 = st.integers(-(2**63), 2**63 - 1)
    known: st.SearchStrategy[Any] = st.integers(0, table.num_embeddings - 1)
    unknown: st.SearchStrategy[Any] = int64
    if table.ids.rule == "map":
        known = st.sampled_from(VOCABULARIES[table.name])
        unknown = st.text(max_size=4) if table.ids.id_type == "string" else int64
    return known if table.ids.unknown == "error" and table.ids.rule != "modulo" else known | unknown


@st.composite
def weights_or_none(draw: st.DrawFn, bags: Bags) -> Weights | None:
    if draw(st.booleans()):
        return None
    return {
        feature: [[draw(WEIGHT) for _ in bag] for bag in feature_bags]
        for feature, feature_bags in bags.items()
    }


@st.composite
def mutated_json(draw: st.DrawFn) -> Any:
    """Draws a valid body with one value anywhere in it replaced, removed or duplicated."""
    bags = draw(bags_of_ids() | bags_of(ruled_info()))
    body: dict[str, Any] = {"features": bags}
    if weights := draw(weights_or_none(bags)):
        body["weights"] = weights
    _mutate(draw, body)
    return body


def _mutate(draw: st.DrawFn, value: Any) -> None:
    """Descends to a random position of ``value`` and changes it."""
    places = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not places:
        return
    place = draw(st.sampled_from(places))
    inner = value[place]
    if isinstance(inner, dict | list) and inner and draw(st.integers(0, 3)):
        return _mutate(draw, inner)
    action = draw(st.sampled_from(["replace", "remove", "double"]))
    if action == "replace":
        value[place] = draw(JSON_VALUE)
    elif action == "remove":
        del value[place]
    elif isinstance(value, dict):
        value[draw(st.text(max_size=4))] = inner
    else:
        value.append(inner)
    return None
