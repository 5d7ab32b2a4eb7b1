"""Description of a served model for clients, shared by REST and gRPC.

Tables are described as the manifest stores them. The wire contract selects the fields that are
shown: pydantic's Model and embedding.proto's Model leave out fields that they do not declare.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import ParseDict

from embedserve.model_info import ModelInfo
from embedserve_proto import embedding_pb2

ID_RULE_DEFAULTS = {"id_type": "int64", "unknown": "error"}
"""Values of fields of an IdRule message that the stored rule leaves out."""
DESCRIPTION = ("Model message",)
"""Key of a model's description in its cache of response prefixes."""


def describe(model: ModelInfo) -> dict[str, Any]:
    """Returns the description of ``model`` as JSON values."""
    return {
        "model": model.name,
        "version": model.version,
        "features": list(model.features),
        "keys": list(model.keys),
        "length_per_key": list(model.length_per_key),
        "unpooled": not model.is_pooled,
        "tables": [
            table.to_json()
            | {
                "features": list(table.feature_names),
                "sharding": model.plan.tables[table.name].sharding_type,
            }
            for table in model.tables
        ],
        "device": model.device_type,
        "bytes_per_rank": list(model.bytes_per_rank),
        "replicas": model.replicas,
        "replanned": model.replanned,
        "lookup": model.lookup_kind,
        "fingerprint": model.fingerprint,
        "part": 0 if model.part is None else model.part.number,
        "parts": 0 if model.part is None else model.part.count,
    }


def model_message(model: ModelInfo, status: dict[str, Any]) -> embedding_pb2.Model:
    """Returns ``model`` and its serving status as the message of ListModels and GetModel.

    The description is cached: routers ask each shard for it once a second.
    """
    described = model.response_prefix_cache.get(DESCRIPTION)
    if described is None:
        described = _described(model)
        model.cache_response_prefix(DESCRIPTION, described)
    message = embedding_pb2.Model()
    message.CopyFrom(described)
    return ParseDict(status, message, ignore_unknown_fields=True)


def _described(model: ModelInfo) -> embedding_pb2.Model:
    described = describe(model)
    for table in described["tables"]:
        table["ids"] = ID_RULE_DEFAULTS | table["ids"]
    return ParseDict(described, embedding_pb2.Model(), ignore_unknown_fields=True)
