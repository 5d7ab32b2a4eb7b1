"""Tests that REST and gRPC describe a model alike, each in its own schema."""

from typing import Any

import pytest
from server.fake_models import model_info, ruled_info, unpooled_info

from embedserve.api.management import Model, TableResponse
from embedserve.codec.model_description import describe, model_message
from embedserve.model_info import ModelInfo
from embedserve_proto import embedding_pb2

STATUS = {
    "alias": "canary",
    "share": 12.5,
    "shadow": 5.0,
    "since": "2026-01-01T00:00:00+00:00",
    "leaving": [6],
}


def rest_description(model: ModelInfo) -> dict[str, Any]:
    return Model.model_validate(describe(model) | STATUS).model_dump(exclude_none=True)


def test_table_is_described_with_manifest_fields_and_sharding() -> None:
    table = describe(ruled_info())["tables"][3]
    assert table == {
        "name": "t_day",
        "num_embeddings": 6,
        "embedding_dim": 1,
        "feature_names": ["day"],
        "pooling": "sum",
        "dtype": "float32",
        "sha256": "",
        "row_bytes": 16,
        "features": ["day"],
        "sharding": "table_wise",
        "ids": {"rule": "modulo", "modulus": 4, "offset": 2},
    }


@pytest.mark.parametrize("model", [model_info(), ruled_info(), unpooled_info()])
def test_rest_and_grpc_descriptions_agree(model: ModelInfo) -> None:
    described = rest_description(model)
    rest_only = ("device", "bytes_per_rank", "replicas", "replanned", "lookup", "since")
    for key in (*rest_only, "leaving", "shadow"):
        del described[key]
    for table in described["tables"]:
        table["ids"] = {"id_type": "int64", "unknown": "error"} | table["ids"]
    assert model_message(model, STATUS) == embedding_pb2.Model(**described)


def test_cached_description_has_the_current_share() -> None:
    model = model_info()
    shares = [model_message(model, STATUS | {"share": share}).share for share in (12.5, 50.0, 0.0)]
    assert shares == [12.5, 50.0, 0.0]


def test_internal_manifest_fields_are_not_exposed_over_rest() -> None:
    for table in rest_description(ruled_info())["tables"]:
        assert table.keys() == set(TableResponse.model_fields)
        assert "sha256" not in table["ids"]
