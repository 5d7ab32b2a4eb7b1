from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OutputDType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FLOAT32: _ClassVar[OutputDType]
    FLOAT16: _ClassVar[OutputDType]
FLOAT32: OutputDType
FLOAT16: OutputDType

class EmbedRequest(_message.Message):
    __slots__ = ("model", "keys", "ids", "lengths", "weights", "ids_bytes", "lengths_bytes", "weights_bytes", "string_keys", "string_ids", "output_dtype", "version", "output_keys", "min_seq")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    IDS_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    STRING_KEYS_FIELD_NUMBER: _ClassVar[int]
    STRING_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_KEYS_FIELD_NUMBER: _ClassVar[int]
    MIN_SEQ_FIELD_NUMBER: _ClassVar[int]
    model: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    ids: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    ids_bytes: bytes
    lengths_bytes: bytes
    weights_bytes: bytes
    string_keys: _containers.RepeatedScalarFieldContainer[str]
    string_ids: _containers.RepeatedScalarFieldContainer[str]
    output_dtype: OutputDType
    version: str
    output_keys: _containers.RepeatedScalarFieldContainer[str]
    min_seq: int
    def __init__(self, model: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., ids: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ..., ids_bytes: _Optional[bytes] = ..., lengths_bytes: _Optional[bytes] = ..., weights_bytes: _Optional[bytes] = ..., string_keys: _Optional[_Iterable[str]] = ..., string_ids: _Optional[_Iterable[str]] = ..., output_dtype: _Optional[_Union[OutputDType, str]] = ..., version: _Optional[str] = ..., output_keys: _Optional[_Iterable[str]] = ..., min_seq: _Optional[int] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("model", "version", "keys", "length_per_key", "batch_size", "values", "error", "unknown_ids", "lengths", "output_dtype", "seq", "missing_ids")
    class UnknownIdsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MissingIdsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PER_KEY_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    MISSING_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    length_per_key: _containers.RepeatedScalarFieldContainer[int]
    batch_size: int
    values: bytes
    error: Error
    unknown_ids: _containers.ScalarMap[str, int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    output_dtype: OutputDType
    seq: int
    missing_ids: _containers.ScalarMap[str, int]
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ..., length_per_key: _Optional[_Iterable[int]] = ..., batch_size: _Optional[int] = ..., values: _Optional[bytes] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., unknown_ids: _Optional[_Mapping[str, int]] = ..., lengths: _Optional[_Iterable[int]] = ..., output_dtype: _Optional[_Union[OutputDType, str]] = ..., seq: _Optional[int] = ..., missing_ids: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "field")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    field: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "default_model")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MODEL_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    default_model: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., default_model: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("model", "version", "features", "keys", "length_per_key", "tables", "unpooled", "alias", "share", "fingerprint", "part", "parts")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PER_KEY_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    UNPOOLED_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    keys: _containers.RepeatedScalarFieldContainer[str]
    length_per_key: _containers.RepeatedScalarFieldContainer[int]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    unpooled: bool
    alias: str
    share: float
    fingerprint: str
    part: int
    parts: int
    def __init__(self, model: _Optional[str] = ..., version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., keys: _Optional[_Iterable[str]] = ..., length_per_key: _Optional[_Iterable[int]] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., unpooled: bool = ..., alias: _Optional[str] = ..., share: _Optional[float] = ..., fingerprint: _Optional[str] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("name", "num_embeddings", "embedding_dim", "pooling", "dtype", "features", "sharding", "ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_DIM_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SHARDING_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_embeddings: int
    embedding_dim: int
    pooling: str
    dtype: str
    features: _containers.RepeatedScalarFieldContainer[str]
    sharding: str
    ids: IdRule
    def __init__(self, name: _Optional[str] = ..., num_embeddings: _Optional[int] = ..., embedding_dim: _Optional[int] = ..., pooling: _Optional[str] = ..., dtype: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., sharding: _Optional[str] = ..., ids: _Optional[_Union[IdRule, _Mapping]] = ...) -> None: ...

class IdRule(_message.Message):
    __slots__ = ("rule", "id_type", "entries", "modulus", "offset", "unknown", "default_row", "examples")
    RULE_FIELD_NUMBER: _ClassVar[int]
    ID_TYPE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MODULUS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_ROW_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    rule: str
    id_type: str
    entries: int
    modulus: int
    offset: int
    unknown: str
    default_row: int
    examples: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rule: _Optional[str] = ..., id_type: _Optional[str] = ..., entries: _Optional[int] = ..., modulus: _Optional[int] = ..., offset: _Optional[int] = ..., unknown: _Optional[str] = ..., default_row: _Optional[int] = ..., examples: _Optional[_Iterable[str]] = ...) -> None: ...
