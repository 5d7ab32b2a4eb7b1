"""Description of a served model for clients, shared by REST and gRPC.

Tables are described as the manifest stores them. The wire contract selects the fields that are
shown: pydantic's Model and embedding.proto's Model leave out fields that they do not declare.
"""

from __future__ import annotations

from typing import Any

from embedserve.model_info import ModelInfo


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
