"""What callers may know of a served model, said once for REST and gRPC.

Tables are described as the manifest stores them. What of it is shown is for the wire's own
contract to say: pydantic's Model and embedding.proto's leave out what they do not name.
"""

from __future__ import annotations

from typing import Any

from embedserve.model_info import ModelInfo


def describe(model: ModelInfo) -> dict[str, Any]:
    """``model`` as JSON values."""
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
    }
