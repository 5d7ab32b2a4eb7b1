"""What the server says about its models, as frozen records.

Built from the wire contract's messages; REST's JSON has the same fields and is read into
those messages first, so there is one way to read either.
"""

import json
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from embedserve_client.errors import ServerError
from embedserve_proto import embedding_pb2 as pb


@dataclass(frozen=True)
class IdRule:
    """How ids of a table become row numbers.

    rule: rows (an id is a row number), modulo (row = id mod modulus + offset) or map (a stored
        vocabulary of entries ids says the row).
    id_type: int64, or string.
    unknown: what becomes of an id without a row: error refuses its request, skip leaves it out
        of its bag, row looks up default_row.
    examples: of a map of strings, some that the vocabulary holds.
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
    """One embedding table; dtype is that of the stored rows, sharding as restored."""

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
    """One served model: the features that requests may name, the keys that answers have.

    is_pooled: answers have one vector for each key and example; else one for each id.
    alias: that this version is served by, asked for as MODEL@ALIAS; "" for the newest.
    share: percent of the requests that name the model and no version.
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
    """Every served model; default_model answers requests that name none, "" if none does."""

    models: tuple[ModelInfo, ...]
    default_model: str


def model_list_of(message: pb.ListModelsResponse) -> ModelList:
    """The record of a ListModelsResponse."""
    models = tuple(model_info_of(model) for model in message.models)
    return ModelList(models=models, default_model=message.default_model)


def model_info_of(message: pb.Model) -> ModelInfo:
    """The record of a Model."""
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
    """The record of GET /models."""
    return model_list_of(_parse(body, pb.ListModelsResponse()))


def model_info_from_json(body: bytes) -> ModelInfo:
    """The record of GET /models/{model}."""
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
    """What a server leaves out has one meaning: rows, int64, error."""
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
    """Newer servers may say more: fields that the contract does not name are passed over."""
    name = message.DESCRIPTOR.name
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            raise ServerError(f"the server's JSON is no {name}: it is no object")
        return json_format.ParseDict(fields, message, ignore_unknown_fields=True)
    except (json_format.ParseError, ValueError) as error:
        raise ServerError(f"the server's JSON is no {name}: {error}") from error
