"""Encodes vectors as a stream of one record batch.

A pooled response has a single column, `values`. For each example it has the vectors of all keys one
after the other, as in a KeyedTensor. The values are thus written without a copy. A caller may
request a column for each key instead, which is copied out of these values. An unpooled response has
a column of lists for each key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import orjson

from embedserve.codec.arrow.columns import BY_KEY
from embedserve.codec.arrow.flatbuffers import INT16, INT32, INT64, UINT8, Number, TableFields
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
from embedserve.codec.open_inference.outputs import tensors_of
from embedserve.lookup_types import EncodedResponse, LookupResult, with_size
from embedserve.request_checks import SEQ_DIGITS_MAX

VALUES = "values"
"""Name of the column with the vectors of all keys."""
ITEM = "item"
"""Name of the child field of lists."""
ALIGNMENT = 8
_DTYPES: Mapping[int, np.dtype] = {4: np.dtype("<f4"), 2: np.dtype("<f2")}
"""Dtypes of the values, by their bytes."""
_INT32 = np.dtype("<i4")
INLINE_KEYS_MAX = 64
"""Keys of a response whose columns are described on the event loop's thread, in about a
millisecond."""
INLINE_LENGTHS_MAX = 262_144
INLINE_VECTORS_MAX, INLINE_COPY_BYTES_MAX = 16_384, 8 << 20
"""Vectors and bytes that are copied on the event loop's thread. A vector takes about 20 ns, and 14
bytes are copied per nanosecond."""
_SEQ_ROOM = "0" * SEQ_DIGITS_MAX
"""Text in place of the seq in a cached start."""
ByteChunk = bytes | memoryview


class _BodyBuffers:
    """The body of a record batch: its nodes, its buffers and their bytes.

    Attributes:
        nodes: (length, nulls) of each node.
        buffers: (start, size) of each buffer.
        nbytes: bytes of all buffers, padding included.
        chunks: chunks of the body; some are copied only when they are written.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int]] = []
        self.buffers: list[tuple[int, int]] = []
        self.nbytes = 0
        self.chunks: list[Iterable[ByteChunk]] = []

    def add_node(self, length: int) -> None:
        """Adds the node of an array without nulls, and its empty validity buffer."""
        self.nodes.append((length, 0))
        self.buffers.append((self.nbytes, 0))

    def add_buffer(self, nbytes: int, chunks: Iterable[ByteChunk]) -> None:
        padding = -nbytes % ALIGNMENT
        self.buffers.append((self.nbytes, nbytes))
        self.chunks += [chunks, (bytes(padding),)] if padding else [chunks]
        self.nbytes += nbytes + padding

    def add_vectors(self, count: int, dim: int, itemsize: int, chunks: Iterable[ByteChunk]) -> None:
        """Adds an array of fixed-size lists."""
        self.add_node(count)
        self.add_node(count * dim)
        self.add_buffer(count * dim * itemsize, chunks)


def try_encode_inline(result: LookupResult) -> EncodedResponse | None:
    """Returns (the chunks of a stream, their byte count). A response in a single column, whose
    values are not copied, is always encoded; otherwise returns None where encoding would take long.
    """
    if _is_by_key(result) and not _is_quick(result):
        return None
    return with_size([*encode_chunks(result)])


def encode_chunks(result: LookupResult) -> Iterator[ByteChunk]:
    """Yields the chunks of any response in order, each quick to encode."""
    body = _body(result)
    yield _start(result, body)
    for chunks in body.chunks:
        yield from chunks
    yield END


def _is_by_key(result: LookupResult) -> bool:
    if result.lengths is not None:
        return True
    return result.output is not None and result.output.format_options == BY_KEY


def _is_quick(result: LookupResult) -> bool:
    """Returns whether the columns are described, and the values copied, in about a millisecond."""
    keys = len(result.model.keys)
    if keys > INLINE_KEYS_MAX:
        return False
    if result.lengths is not None:  # the rows of an unpooled response are not copied
        return result.lengths.size <= INLINE_LENGTHS_MAX
    values = [result.values, *result.extra_chunks]
    vectors, nbytes = keys * sum(map(len, values)), sum(one.nbytes for one in values)
    return vectors <= INLINE_VECTORS_MAX and nbytes <= INLINE_COPY_BYTES_MAX


def _body(result: LookupResult) -> _BodyBuffers:
    body, itemsize = _BodyBuffers(), result.values.itemsize
    dtype = _DTYPES[itemsize]
    if not _is_by_key(result):
        values = [result.values, *result.extra_chunks]
        whole = [np.ascontiguousarray(one, dtype).data for one in values]
        body.add_vectors(sum(map(len, values)), values[0].shape[1], itemsize, whole)
        return body
    tensors = tensors_of(result)
    for at, tensor in enumerate(tensors):
        if result.lengths is not None:
            offsets = np.zeros(result.lengths.shape[1] + 1, _INT32)
            np.cumsum(result.lengths[at], out=offsets[1:])
            body.add_node(offsets.size - 1)
            body.add_buffer(offsets.nbytes, (offsets.data,))
        chunks = (np.ascontiguousarray(one, dtype).data for one in tensor.chunks(result))
        body.add_vectors(*tensor.shape, itemsize, chunks)
    return body


def _start(result: LookupResult, body: _BodyBuffers) -> bytes:
    """Returns all bytes before the body of the record batch. For pooled responses they are cached
    with the model, by the number of examples, the dtype, the layout and whether there is a seq. The
    seq itself, which changes many times a second, is written into a copy."""
    key = made = None
    if result.lengths is None and result.unknown_ids is None and result.missing_ids is None:
        layout = _is_by_key(result), result.seq is not None
        key = ("arrow", body.nodes[0][0], result.values.itemsize, *layout)
        made = result.model.response_prefix_cache.get(key)
    if made is None:
        made = _make_start(result, body)
        result.model.cache_response_prefix(key, made)
    start, seq_at = made
    return start if result.seq is None else _with_seq(start, seq_at, result.seq)


def _make_start(result: LookupResult, body: _BodyBuffers) -> tuple[bytes, int]:
    """Returns (all bytes before the body, with room for a seq; the position of its string)."""
    schema = message_of(SCHEMA, _schema(result), 0)
    # The last string of the schema, which follows the names from the manifest.
    seq_at = 0 if result.seq is None else schema.rindex(_SEQ_ROOM.encode()) - INT32.size
    batch = message_of(
        RECORD_BATCH,
        {
            ROWS: Number(INT64, body.nodes[0][0]),
            NODES: np.array(body.nodes, np.int64),
            BUFFERS: np.array(body.buffers, np.int64),
        },
        body.nbytes,
    )
    return schema + batch, seq_at


def _with_seq(start: bytes, seq_at: int, seq: int) -> bytes:
    """Returns ``start`` with ``seq`` in the room at ``seq_at``. A FlatBuffers string has its size
    before it and a zero behind it; the rest of the room is padding."""
    digits = b"%d" % seq
    text = INT32.pack(len(digits)) + digits.ljust(SEQ_DIGITS_MAX, b"\0")
    return start[:seq_at] + text + start[seq_at + len(text) :]


def _schema(result: LookupResult) -> TableFields:
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
    metadata: Mapping[str, object] = {
        "model": model.name,
        "version": model.version,
        "keys": model.keys,
        "length_per_key": model.length_per_key,
    }
    if result.unknown_ids:
        metadata = {**metadata, "unknown_ids": result.unknown_ids}
    if result.missing_ids:
        metadata = {**metadata, "missing_ids": result.missing_ids}
    if result.seq is not None:
        metadata = {**metadata, "seq": _SEQ_ROOM}
    return {
        FIELDS: columns,
        METADATA: [{KEY: PREFIX + name, VALUE: _text(value)} for name, value in metadata.items()],
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _vectors(name: str, dim: int, itemsize: int) -> TableFields:
    """Returns the field of a column of fixed-size lists."""
    precision = FLOATS.index(f"float{8 * itemsize}")
    item = _field(ITEM, FLOAT, {0: Number(INT16, precision)}, [])
    return _field(name, FIXED_SIZE_LIST, {0: Number(INT32, dim)}, [item])


def _field(name: str, kind: int, of: TableFields, children: Sequence[TableFields]) -> TableFields:
    return {NAME: name, TYPE_KIND: Number(UINT8, kind), TYPE: of, CHILDREN: children}
