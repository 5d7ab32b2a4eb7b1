"""Vectors as a stream of one record batch.

A pooled answer is one column, `values`, with the vectors of all keys of an example one after the
other, as a KeyedTensor has them: its values are written as they lie. A caller may have a column
for each key instead, which are copied out of these. An unpooled answer has a column of lists for
each key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import orjson

from embedserve.codec.arrow.columns import BY_KEY
from embedserve.codec.arrow.flatbuffers import INT16, INT32, INT64, UINT8, Fields, Number
from embedserve.codec.arrow.schema import (
    CHILDREN,
    FIELDS,
    FIXED_SIZE_LIST,
    FLOAT,
    FLOATS,
    KEY,
    LIST,
    METADATA,
    NAME,
    PREFIX,
    TYPE,
    TYPE_KIND,
    VALUE,
)
from embedserve.codec.arrow.stream import (
    BUFFERS,
    END,
    NODES,
    RECORD_BATCH,
    ROWS,
    SCHEMA,
    message_of,
)
from embedserve.codec.open_inference.answers import (
    OutputTensor,
    ResponseOptions,
    keep_start,
    tensors_of,
)
from embedserve.lookup import EncodedResponse, LookupResult, OutputOptions, with_size

VALUES = "values"
"""The column that has the vectors of all keys."""
ITEM = "item"
"""What the values of lists are called."""
ALIGNMENT = 8
_DTYPES: Mapping[int, np.dtype] = {4: np.dtype("<f4"), 2: np.dtype("<f2")}
"""By the bytes of a value."""
_INT32 = np.dtype("<i4")
NOW_KEYS_MAX = 64
"""Whose columns are described on the event loop's thread, in a millisecond."""
NOW_LENGTHS_MAX = 262_144
NOW_VECTORS_MAX, NOW_BYTES_MAX = 16_384, 8 << 20
"""That are copied there: each takes 20 ns or so, and 14 bytes a nanosecond."""
_ALL_KEYS, _OUTPUT = ResponseOptions(), OutputOptions()
Piece = bytes | memoryview


class _BodyBuffers:
    """The body of a record batch: which nodes and buffers it has, and their bytes.

    Attributes:
        nbytes: of all.
        pieces: the bytes; some are copied only when they are written.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int]] = []
        self.buffers: list[tuple[int, int]] = []
        self.nbytes = 0
        self.pieces: list[Iterable[Piece]] = []

    def add_node(self, length: int) -> None:
        """Of an array, none of which is null."""
        self.nodes.append((length, 0))
        self.buffers.append((self.nbytes, 0))

    def add_buffer(self, nbytes: int, pieces: Iterable[Piece]) -> None:
        padding = -nbytes % ALIGNMENT
        self.buffers.append((self.nbytes, nbytes))
        self.pieces += [pieces, (bytes(padding),)] if padding else [pieces]
        self.nbytes += nbytes + padding

    def add_vectors(self, count: int, dim: int, itemsize: int, pieces: Iterable[Piece]) -> None:
        """An array of fixed-size lists."""
        self.add_node(count)
        self.add_node(count * dim)
        self.add_buffer(count * dim * itemsize, pieces)


def try_encode_inline(result: LookupResult) -> EncodedResponse | None:
    """(a stream in pieces, their bytes): of the plain form, whose values are not copied, always;
    else None where it would take long."""
    if _is_by_key(result) and not _is_quick(result):
        return None
    return with_size([*encode_pieces(result)])


def encode_pieces(result: LookupResult) -> Iterator[Piece]:
    """The pieces of any answer, none of which takes long to make."""
    body = _body(result)
    yield _start(result, body)
    for pieces in body.pieces:
        yield from pieces
    yield END


def _is_by_key(result: LookupResult) -> bool:
    if result.lengths is not None:
        return True
    return result.output is not None and result.output.form == BY_KEY


def _is_quick(result: LookupResult) -> bool:
    """Whether its columns are described, and its values copied, in a millisecond or so."""
    keys = len(result.model.keys)
    if keys > NOW_KEYS_MAX:
        return False
    if result.lengths is not None:  # whose rows are written as they lie
        return result.lengths.size <= NOW_LENGTHS_MAX
    values = [result.values, *result.extra_chunks]
    vectors, nbytes = keys * sum(map(len, values)), sum(one.nbytes for one in values)
    return vectors <= NOW_VECTORS_MAX and nbytes <= NOW_BYTES_MAX


def _body(result: LookupResult) -> _BodyBuffers:
    body, itemsize = _BodyBuffers(), result.values.itemsize
    dtype = _DTYPES[itemsize]
    if not _is_by_key(result):
        values = [result.values, *result.extra_chunks]
        pieces = [np.ascontiguousarray(one, dtype).data for one in values]
        body.add_vectors(sum(map(len, values)), values[0].shape[1], itemsize, pieces)
        return body
    tensors = tensors_of(result, _ALL_KEYS, _OUTPUT)
    for at, tensor in enumerate(tensors):
        if result.lengths is not None:
            offsets = np.zeros(result.lengths.shape[1] + 1, _INT32)
            np.cumsum(result.lengths[at], out=offsets[1:])
            body.add_node(offsets.size - 1)
            body.add_buffer(offsets.nbytes, (offsets.data,))
        body.add_vectors(*tensor.shape, itemsize, _pieces(tensor, result, dtype))
    return body


def _pieces(tensor: OutputTensor, result: LookupResult, dtype: np.dtype) -> Iterator[Piece]:
    for values in tensor.pieces(result):
        yield np.ascontiguousarray(values, dtype).data


def _start(result: LookupResult, body: _BodyBuffers) -> bytes:
    """All that comes before the body of the record batch; of pooled answers kept with the model,
    by their examples."""
    key = None
    if result.lengths is None and result.unknown_ids is None:
        key = ("arrow", body.nodes[0][0], result.values.itemsize, _is_by_key(result))
        start: bytes | None = result.model.response_prefix_cache.get(key)
        if start is not None:
            return start
    start = message_of(SCHEMA, _schema(result), 0) + message_of(
        RECORD_BATCH,
        {
            ROWS: Number(INT64, body.nodes[0][0]),
            NODES: np.array(body.nodes, np.int64),
            BUFFERS: np.array(body.buffers, np.int64),
        },
        body.nbytes,
    )
    keep_start(result.model, key, start)
    return start


def _schema(result: LookupResult) -> Fields:
    model, itemsize = result.model, result.values.itemsize
    if not _is_by_key(result):
        columns = [_vectors(VALUES, result.values.shape[1], itemsize)]
    else:
        keys = zip(model.keys, model.length_per_key, strict=True)
        columns = [_vectors(key, dim, itemsize) for key, dim in keys]
    if result.lengths is not None:
        columns = [
            _field(key, LIST, {}, [{**one, NAME: ITEM}])
            for key, one in zip(model.keys, columns, strict=True)
        ]
    said: Mapping[str, object] = {
        "model": model.name,
        "version": model.version,
        "keys": model.keys,
        "length_per_key": model.length_per_key,
    }
    if result.unknown_ids:
        said = {**said, "unknown_ids": result.unknown_ids}
    return {
        FIELDS: columns,
        METADATA: [{KEY: PREFIX + name, VALUE: _text(value)} for name, value in said.items()],
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _vectors(name: str, dim: int, itemsize: int) -> Fields:
    """A column of fixed-size lists."""
    precision = FLOATS.index(f"float{8 * itemsize}")
    item = _field(ITEM, FLOAT, {0: Number(INT16, precision)}, [])
    return _field(name, FIXED_SIZE_LIST, {0: Number(INT32, dim)}, [item])


def _field(name: str, kind: int, of: Fields, children: Sequence[Fields]) -> Fields:
    return {NAME: name, TYPE_KIND: Number(UINT8, kind), TYPE: of, CHILDREN: children}
