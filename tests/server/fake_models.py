"""Descriptions of models that are in no store: plain, with many id rules, and unpooled."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from embedserve.model_info import ModelInfo
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.id_map import IdMap
from embedserve_store.ids.string_hashes import hash_strings
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.plans.plan import Plan, Shard, TablePlan

Vocabularies = Mapping[str, Sequence[int | str]]
"""Ids of each table, each at the position of its row."""

FEATURES = {"user": (7, 4), "movie": (11, 3), "tag": (5, 2)}
"""(rows, dim) of each feature's table."""

VOCABULARIES: Vocabularies = {
    "t_user": (-1, 0, 2**63 - 1, -(2**63), 10**15),
    "t_tag": ("drama", "comédie", "映画", ""),
    "t_shelf": (100, 200, 300),
}


def info_of(name: str, tables: Sequence[TableSpec], vocabularies: Vocabularies) -> ModelInfo:
    """Returns the description of a served model with ``tables`` and the id maps
    ``vocabularies``."""
    described = tuple(
        replace(table, ids=_filled(table.ids, vocabularies[table.name]))
        if table.ids.rule == "map"
        else table
        for table in tables
    )
    manifest = Manifest(name, 7, described, is_weighted=False)
    maps = {table: _id_map(table, ids) for table, ids in vocabularies.items()}
    return served_of(manifest, IdTranslator(manifest, maps))


def served_of(manifest: Manifest, translator: IdTranslator, plan: Plan | None = None) -> ModelInfo:
    """Returns the description of a version as if it were restored under ``plan``; without, on one
    rank."""
    return ModelInfo(
        manifest=manifest,
        plan=plan or whole_on_rank_0(manifest.tables),
        translator=translator,
        device_type="cpu",
        replanned=False,
        lookup_kind="traced",
    )


def whole_on_rank_0(tables: Sequence[TableSpec]) -> Plan:
    """Returns a plan of one rank."""
    return Plan(
        1,
        {
            table.name: TablePlan(
                "table_wise", (Shard(0, 0, table.num_embeddings, 0, table.embedding_dim),)
            )
            for table in tables
        },
        {},
    )


def _filled(rule: IdRule, vocabulary: Sequence[int | str]) -> IdRule:
    strings = tuple(one for one in vocabulary if isinstance(one, str))
    return replace(rule, entries=len(vocabulary), examples=strings[:2])


def _id_map(table: str, vocabulary: Sequence[int | str]) -> IdMap:
    strings = [one for one in vocabulary if isinstance(one, str)]
    ids = hash_strings(strings) if strings else np.array(vocabulary, np.int64)
    return IdMap.build(ids, np.arange(len(vocabulary)), table)


def model_info(name: str = "shop", features: dict[str, tuple[int, int]] = FEATURES) -> ModelInfo:
    """Returns a model of sums of float32 rows, whose ids are row numbers."""
    tables = [
        TableSpec(f"t_{feature}", rows, dim, (feature,), "sum", "float32")
        for feature, (rows, dim) in features.items()
    ]
    example = {feature: [[0, rows - 1], [1]] for feature, (rows, _) in features.items()}
    return replace(info_of(name, tables, {}), example=example)


def ruled_info() -> ModelInfo:
    """Returns a model of sums and means with every id rule; its maps are VOCABULARIES."""
    as_map = IdRule("map", unknown="skip")
    return info_of(
        "ruled",
        [
            TableSpec("t_user", 5, 4, ("user",), "sum", "float32", ids=as_map),
            TableSpec(
                "t_movie",
                11,
                3,
                ("movie",),
                "mean",
                "float32",
                ids=IdRule(unknown="row", default_row=3),
            ),
            TableSpec(
                "t_tag", 4, 2, ("tag",), "mean", "float32", ids=replace(as_map, id_type="string")
            ),
            TableSpec(
                "t_day", 6, 1, ("day",), "sum", "float32", ids=IdRule("modulo", modulus=4, offset=2)
            ),
            TableSpec("t_shelf", 3, 2, ("shelf",), "sum", "float32", ids=IdRule("map")),
        ],
        VOCABULARIES,
    )


def unpooled_info() -> ModelInfo:
    """Returns an unpooled model. t_item serves two features, and two tables serve item."""
    skip = IdRule(unknown="skip")
    as_map = IdRule("map", id_type="string", unknown="skip")
    return info_of(
        "sequence",
        [
            TableSpec("t_item", 9, 4, ("item", "last"), "none", "float32", ids=skip),
            TableSpec("t_tag", 4, 4, ("tag",), "none", "float32", ids=as_map),
            TableSpec("t_again", 9, 4, ("item",), "none", "float32", ids=skip),
        ],
        {"t_tag": VOCABULARIES["t_tag"]},
    )
