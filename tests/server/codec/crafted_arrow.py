"""Provides Arrow streams with changed fields, and the decoder and limits for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from embedserve.codec.arrow.flatbuffers import INT64, Number, TableFields
from embedserve.codec.arrow.requests import ArrowDecoder
from embedserve.codec.arrow.stream import BUFFERS, END, NODES, RECORD_BATCH, ROWS, message_of
from embedserve.config import Limits

ARROW = ArrowDecoder()
LIMITS = Limits(request_examples_max=100, request_ids_max=1000, request_features_max=20)
LIST_SCHEMA = pa.schema({"user": pa.list_(pa.int64())}).serialize().to_pybytes()
LARGE_LIST_SCHEMA = pa.schema({"user": pa.large_list(pa.int64())}).serialize().to_pybytes()
STRING_SCHEMA = pa.schema({"user": pa.list_(pa.string())}).serialize().to_pybytes()


@dataclass
class CraftedStream:
    """A stream of two bags, [1, 2] and [3], with some fields changed.

    Attributes:
        buffers: (offset in the body, bytes) of the list's bitmap and offsets, and of the values'
            bitmap and values.
    """

    rows: int = 2
    offsets: Sequence[int] = (0, 2, 3)
    nodes: Sequence[tuple[int, int]] = ((2, 0), (3, 0))
    buffers: Sequence[tuple[int, int]] = ((0, 0), (0, 12), (16, 0), (16, 24))
    schema: bytes = LIST_SCHEMA
    dtype: str = "<i4"
    more: TableFields = field(default_factory=dict)
    body_bytes: int | None = None

    def stream(self) -> bytes:
        offsets = np.array(self.offsets, np.int64).astype(self.dtype).tobytes()
        body = offsets.ljust(16 if self.dtype == "<i4" else 24, b"\0")
        body += np.arange(1, 4).tobytes()
        header = {
            ROWS: Number(INT64, self.rows),
            NODES: np.array(self.nodes, np.int64).reshape(-1, 2),
            BUFFERS: np.array(self.buffers, np.int64).reshape(-1, 2),
            **self.more,
        }
        nbytes = len(body) if self.body_bytes is None else self.body_bytes
        return self.schema + message_of(RECORD_BATCH, header, nbytes) + body + END


LARGE_LIST_FIELDS: dict[str, Any] = {
    "schema": LARGE_LIST_SCHEMA,
    "dtype": "<i8",
    "buffers": ((0, 0), (0, 24), (24, 0), (24, 24)),
}
