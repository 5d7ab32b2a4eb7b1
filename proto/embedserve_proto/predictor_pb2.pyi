from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PredictionRequest(_message.Message):
    __slots__ = ("batch_size", "float_features", "id_list_features", "id_score_list_features", "embedding_features", "unary_features")
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    FLOAT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    ID_LIST_FEATURES_FIELD_NUMBER: _ClassVar[int]
    ID_SCORE_LIST_FEATURES_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FEATURES_FIELD_NUMBER: _ClassVar[int]
    UNARY_FEATURES_FIELD_NUMBER: _ClassVar[int]
    batch_size: int
    float_features: FloatFeatures
    id_list_features: SparseFeatures
    id_score_list_features: SparseFeatures
    embedding_features: FloatFeatures
    unary_features: SparseFeatures
    def __init__(self, batch_size: _Optional[int] = ..., float_features: _Optional[_Union[FloatFeatures, _Mapping]] = ..., id_list_features: _Optional[_Union[SparseFeatures, _Mapping]] = ..., id_score_list_features: _Optional[_Union[SparseFeatures, _Mapping]] = ..., embedding_features: _Optional[_Union[FloatFeatures, _Mapping]] = ..., unary_features: _Optional[_Union[SparseFeatures, _Mapping]] = ...) -> None: ...

class SparseFeatures(_message.Message):
    __slots__ = ("num_features", "lengths", "values", "weights")
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    num_features: int
    lengths: bytes
    values: bytes
    weights: bytes
    def __init__(self, num_features: _Optional[int] = ..., lengths: _Optional[bytes] = ..., values: _Optional[bytes] = ..., weights: _Optional[bytes] = ...) -> None: ...

class FloatFeatures(_message.Message):
    __slots__ = ("num_features", "values")
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    num_features: int
    values: bytes
    def __init__(self, num_features: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class PredictionResponse(_message.Message):
    __slots__ = ("predictions",)
    class PredictionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: FloatVec
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[FloatVec, _Mapping]] = ...) -> None: ...
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    predictions: _containers.MessageMap[str, FloatVec]
    def __init__(self, predictions: _Optional[_Mapping[str, FloatVec]] = ...) -> None: ...

class FloatVec(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, data: _Optional[_Iterable[float]] = ...) -> None: ...
