"""Served models as frozen records.

Built from messages of the wire contract. The JSON of REST has the same fields and is parsed into
these messages first, so that there is one reader for both.
"""

import json
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from embedserve_client.errors import ServerError
from embedserve_proto import embedding_pb2 as pb


@dataclass(frozen=True)
class IdRule:
    """Rule that maps the ids of a table to row numbers.

    Attributes:
        rule: "rows" (an id is a row number), "modulo" (row = id mod modulus + offset) or "map" (a
            stored vocabulary of entries ids gives the row).
        id_type: "int64" or "string".
        entries: number of ids in the vocabulary of a map.
        modulus: modulus of the rule modulo.
        offset: first row of the rule modulo.
        unknown: handling of an id without a row. "error" rejects its request, "skip" omits the id
            from its bag, "row" looks up default_row.
        default_row: row that unknown ids get if unknown is "row".
        examples: some ids of the vocabulary, for a map of strings.
    """

    rule: str
    id_type: str
    entries: int
    modulus: int
    offset: int
    unknown: str
    default_row: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class TableInfo:
    """One embedding table. The dtype is that of the stored rows, the sharding that of the running
    server."""

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling: str
    dtype: str
    features: tuple[str, ...]
    sharding: str
    ids: IdRule


@dataclass(frozen=True)
class ModelInfo:
    """One served model: the features that requests may name, and the keys of responses.

    Attributes:
        is_pooled: True if responses have one vector per key and example; False if one per id.
        alias: alias that this version is served by and is requested as MODEL@ALIAS; "" for the
            newest.
        share: percent of the requests for the model without a version that go to this version.
    """

    model: str
    version: int
    features: tuple[str, ...]
    keys: tuple[str, ...]
    length_per_key: tuple[int, ...]
    tables: tuple[TableInfo, ...]
    is_pooled: bool
    alias: str = ""
    share: float = 100.0


@dataclass(frozen=True)
class ModelList:
    """All served models.

    Attributes:
        default_model: model of requests that name none; "" if there is no default.
    """

    models: tuple[ModelInfo, ...]
    default_model: str


def model_list_of(message: pb.ListModelsResponse) -> ModelList:
    """Returns the record of a ListModelsResponse."""
    models = tuple(model_info_of(model) for model in message.models)
    return ModelList(models=models, default_model=message.default_model)


def model_info_of(message: pb.Model) -> ModelInfo:
    """Returns the record of a Model message."""
    return ModelInfo(
        model=message.model,
        version=message.version,
        features=tuple(message.features),
        keys=tuple(message.keys),
        length_per_key=tuple(message.length_per_key),
        tables=tuple(_table_info_of(table) for table in message.tables),
        is_pooled=not message.unpooled,
        alias=message.alias,
        share=message.share,
    )


def model_list_from_json(body: bytes) -> ModelList:
    """Returns the record of the body of GET /models."""
    return model_list_of(_parse(body, pb.ListModelsResponse()))


def model_info_from_json(body: bytes) -> ModelInfo:
    """Returns the record of the body of GET /models/{model}."""
    return model_info_of(_parse(body, pb.Model()))


def _table_info_of(message: pb.Table) -> TableInfo:
    return TableInfo(
        name=message.name,
        num_embeddings=message.num_embeddings,
        embedding_dim=message.embedding_dim,
        pooling=message.pooling,
        dtype=message.dtype,
        features=tuple(message.features),
        sharding=message.sharding,
        ids=_id_rule_of(message.ids),
    )


def _id_rule_of(message: pb.IdRule) -> IdRule:
    """Returns the record of an IdRule. Fields that a server omits mean rows, int64 and error."""
    return IdRule(
        rule=message.rule or "rows",
        id_type=message.id_type or "int64",
        entries=message.entries,
        modulus=message.modulus,
        offset=message.offset,
        unknown=message.unknown or "error",
        default_row=message.default_row,
        examples=tuple(message.examples),
    )


def _parse(body: bytes, message: Any) -> Any:
    """Parses a JSON body into ``message``. Ignores unknown fields, which newer servers may send."""
    name = message.DESCRIPTOR.name
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            raise ServerError(f"the server's JSON is no {name}: it is no object")
        return json_format.ParseDict(fields, message, ignore_unknown_fields=True)
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise ServerError(f"the server's JSON is no {name}: {error}") from error
