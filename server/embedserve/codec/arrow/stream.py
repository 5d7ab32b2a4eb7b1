"""Parses the messages of a stream: its schema, and the positions of its record batches' buffers.

    continuation (4 bytes of 0xff), int32 bytes of metadata, metadata, body; repeated

Only positions are read from a batch here. They are checked against the body: every buffer is within
its batch's body, and the buffers together have no more bytes than it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embedserve.codec.arrow.columns import Schema, SchemaTemplateCache
from embedserve.codec.arrow.flatbuffers import (
    INT16,
    INT32,
    INT64,
    MALFORMED,
    UINT8,
    FlatTable,
    Number,
    Value,
    root,
    write,
)
from embedserve.codec.arrow.schema import malformed, parse
from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve.lookup_types import WouldBlockError

CONTINUATION = b"\xff\xff\xff\xff"
END = CONTINUATION + bytes(INT32.size)
"""Marks the end of a stream."""
FILE_MAGIC = b"ARROW1"
HEAD_BYTES = len(END)
INLINE_SCHEMA_BYTES = 64 << 10
"""Bytes of a schema message that is parsed on the event loop's thread if it is not cached."""
BATCH_OVERHEAD = 64
"""Cost of a record batch, in units of a column of a batch."""
COST_MAX, INLINE_COST_MAX = 16_384, 512
"""Total cost of a stream's record batches, in columns. INLINE_COST_MAX bounds streams that are
read on the event loop's thread."""

# Field numbers of the tables Message and RecordBatch (arrow/format/Message.fbs).
VERSION, HEADER_KIND, HEADER, BODY_BYTES = 0, 1, 2, 3
ROWS, NODES, BUFFERS, COMPRESSION = 0, 1, 2, 3
SCHEMA, RECORD_BATCH = 1, 3
MESSAGE_KINDS = (
    "nothing",
    "a schema",
    "a dictionary batch",
    "a record batch",
    "a tensor",
    "a sparse tensor",
)
V4, V5 = 3, 4
CODECS = ("LZ4", "ZSTD")


@dataclass(frozen=True, slots=True)
class ArrowMessage:
    """A message of a stream.

    Attributes:
        kind: type of its header, SCHEMA or RECORD_BATCH.
        header: table of the header.
        start, end: position of its body in the stream. The next message begins at ``end``.
    """

    kind: int
    header: FlatTable
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Layout of a record batch.

    Attributes:
        rows: number of rows, 1 or more.
        first: position of its first row among the rows of all batches.
        lengths: int64 [nodes], length of each node.
        nulls: number of nulls in each node; empty where there are no nulls.
        starts, sizes: position in the stream and size of each buffer, in bytes.
    """

    rows: int
    first: int
    lengths: np.ndarray
    nulls: list[int]
    starts: list[int]
    sizes: list[int]


def read_message(body: bytes, at: int) -> ArrowMessage | None:
    """Returns the message that begins at ``at``; None at the end of the stream.

    Raises:
        InvalidRequestError: no valid message begins there, or its kind is not supported.
    """
    if at == len(body):
        return None
    head = body[at : at + HEAD_BYTES]
    if len(head) < HEAD_BYTES or not head.startswith(CONTINUATION):
        raise malformed(_not_a_message(at, head))
    start = at + HEAD_BYTES + INT32.unpack_from(head, len(CONTINUATION))[0]
    if head == END:
        if start < len(body):
            raise malformed(f"{len(body) - start} bytes follow its end")
        return None
    if not at < start <= len(body):
        raise malformed(f"the message at byte {at} overruns the {len(body)} bytes of it")
    try:
        return _message(body[at + HEAD_BYTES : start], at, start, len(body))
    except MALFORMED as error:
        raise malformed(f"the message at byte {at} cannot be read: {error}") from error


def _not_a_message(at: int, head: bytes) -> str:
    if head.startswith(FILE_MAGIC):
        return "it is a file (Feather): send a stream (pyarrow: ipc.new_stream)"
    if head.startswith(CONTINUATION):
        return f"it ends within the message at byte {at}"
    return f"a message at byte {at} begins with 0x{head[:4].hex()}, not with 0x{CONTINUATION.hex()}"


def _message(metadata: bytes, at: int, start: int, nbytes: int) -> ArrowMessage:
    """Returns the message with ``metadata``, whose body begins at ``start`` of a stream of
    ``nbytes``."""
    table = root(metadata)
    version, kind = table.number(VERSION, INT16), table.number(HEADER_KIND, UINT8)
    if version not in (V4, V5):
        raise ValueError(f"its version is {version}, expected {V4} or {V5}")
    if kind not in (SCHEMA, RECORD_BATCH):
        shown = MESSAGE_KINDS[kind] if kind < len(MESSAGE_KINDS) else kind
        raise malformed(
            f"the message at byte {at} is {shown}, expected a schema and record batches"
        )
    header, size = table.table(HEADER), table.number(BODY_BYTES, INT64)
    if header is None or not 0 <= size <= nbytes - start:
        raise ValueError(f"it declares {size} more bytes, but has {nbytes - start}")
    return ArrowMessage(kind, header, start, start + size)


def read_schema(
    body: bytes, limits: Limits, schemas: SchemaTemplateCache, *, is_inline: bool
) -> tuple[Schema, int]:
    """Returns (the schema, the position of the first record batch).

    Raises:
        InvalidRequestError: the stream does not begin with a valid schema.
        RequestTooLargeError: it has more columns than ``limits`` allow.
        WouldBlockError: ``is_inline``, and parsing the schema would take long.
    """
    cached = schemas.read(body)
    if cached is not None:
        return cached
    head = body[:HEAD_BYTES]
    size = INT32.unpack_from(head, len(CONTINUATION))[0] if len(head) == HEAD_BYTES else 0
    if is_inline and size > INLINE_SCHEMA_BYTES:
        raise WouldBlockError
    message = read_message(body, 0)
    if message is None or message.kind != SCHEMA:
        raise malformed("it does not begin with a schema")
    schema = parse(message.header, limits, is_inline=is_inline)
    if message.start == message.end and schema.options.min_seq is None:
        # A min_seq differs from request to request, and would evict other callers' schemas.
        schemas.cache_schema(body[: message.end], schema)
    return schema, message.end


def read_batches(
    body: bytes, at: int, schema: Schema, limits: Limits, *, is_inline: bool
) -> list[RecordBatch]:
    """Returns the record batches that have rows.

    Raises:
        InvalidRequestError: a record batch is malformed.
        RequestTooLargeError: there are too many batches, or more rows than ``limits`` allow.
        WouldBlockError: ``is_inline``, and reading the batches would take long.
    """
    found: list[RecordBatch] = []
    rows = cost = 0
    batch_cost = len(schema.columns) + BATCH_OVERHEAD
    cost_max = INLINE_COST_MAX if is_inline else max(COST_MAX, batch_cost)
    while message := read_message(body, at):
        cost += batch_cost
        if cost > cost_max:
            raise WouldBlockError if is_inline else _too_many_batches(cost // batch_cost)
        if message.kind != RECORD_BATCH:
            raise malformed(f"the message at byte {at} is another schema")
        try:
            batch = _read_batch(message, schema, rows, limits)
        except MALFORMED as error:
            raise malformed(f"a record batch cannot be read: {error}") from error
        if batch is not None:
            rows += batch.rows
            found.append(batch)
        at = message.end
    return found


def _too_many_batches(count: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"body has {count} record batches of so many columns, the limit is {count - 1}: send fewer "
        "(pyarrow: combine_chunks)",
        "body",
    )


def _read_batch(
    message: ArrowMessage, schema: Schema, first: int, limits: Limits
) -> RecordBatch | None:
    """Returns the batch in ``message``; None for a batch without rows. Raises one of MALFORMED if
    it cannot be read."""
    table = message.header
    compression = table.table(COMPRESSION)
    if compression is not None:
        codec = compression.number(0, UINT8)
        name = CODECS[codec] if codec < len(CODECS) else codec
        raise InvalidRequestError(
            f"body has a record batch that is compressed by {name}: send it as it is", "body"
        )
    rows = table.number(ROWS, INT64)
    nodes, buffers = table.pairs(NODES), table.pairs(BUFFERS)
    if (len(nodes), len(buffers)) != (schema.nodes, schema.buffers) or rows < 0:
        raise ValueError(
            f"it has {rows} rows, {len(nodes)} nodes and {len(buffers)} buffers, of its columns "
            f"there are {schema.nodes} and {schema.buffers}"
        )
    if first + rows > limits.request_examples_max:
        raise RequestTooLargeError(
            f"features has {first + rows} examples, {limits.describe('request_examples_max')}",
            "features",
        )
    lengths, nulls = nodes[:, 0], nodes[:, 1]
    _check_places(schema, buffers, message.end - message.start)
    if nodes.min() < 0 or (nulls > lengths).any():
        raise ValueError("a node has a negative length, or more nulls than values")
    is_wrong = lengths[schema.own_nodes] != rows
    if is_wrong.any():
        column = schema.columns[int(is_wrong.argmax())]
        raise column.wrong(f"has {lengths[column.node]} examples, its record batch {rows}")
    if not rows:
        return None
    starts, sizes = buffers[:, 0], buffers[:, 1]
    return RecordBatch(
        rows,
        first,
        lengths,
        nulls.tolist() if nulls.any() else [],
        (starts + message.start).tolist(),
        sizes.tolist(),
    )


def _check_places(schema: Schema, buffers: np.ndarray, nbytes: int) -> None:
    """Raises ValueError or InvalidRequestError unless ``buffers``, int64 [n, 2], fit into the body
    of a batch.

    Each buffer must lie within the ``nbytes`` of the body. Their total size must not exceed it, so
    that overlapping buffers cannot multiply the data.
    """
    if not len(buffers):
        return
    starts, sizes = buffers[:, 0], buffers[:, 1]
    ends = starts + sizes  # overflowing sums are negative
    if buffers.min() < 0 or ends.min() < 0 or ends.max() > nbytes:
        at = int(((starts < 0) | (sizes < 0) | (sizes > nbytes - starts)).argmax())
        raise schema.at_buffer(at).wrong(
            f"has a buffer of {sizes[at]} bytes at {starts[at]}, of {nbytes} of its record batch"
        )
    total = int(sizes.sum())
    if total > nbytes:
        raise ValueError(f"its buffers overlap: they have {total} bytes, of {nbytes}")


def message_of(kind: int, header: Value, body_bytes: int) -> bytes:
    """Returns a message of a stream without its body."""
    metadata = write(
        {
            VERSION: Number(INT16, V5),
            HEADER_KIND: Number(UINT8, kind),
            HEADER: header,
            BODY_BYTES: Number(INT64, body_bytes),
        }
    )
    return CONTINUATION + INT32.pack(len(metadata)) + metadata
