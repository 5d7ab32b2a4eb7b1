"""The parsed schema of a request: its columns, their layout in record batches, and response
options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from embedserve.codec.template_cache import TemplateCache
from embedserve.errors import InvalidRequestError

BY_KEY, IN_ONE = "keys", "values"
"""Layouts of a response: a column for each key, or a single column with the vectors of all keys."""
SCHEMA_BYTES_MAX = 1 << 20
"""Bytes of a cached schema's message."""
COLUMN_BYTES = 640
"""Bytes that a column of a cached schema takes, not counting the schema's message."""
_UINT64 = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of ids or weights.

    Attributes:
        name: Arrow's name of the type.
        dtype: dtype of numbers; None for other types.
        offsets: dtype of the offsets of strings; None for other types.
        buffers: number of buffers that the values take in a batch.
    """

    name: str
    dtype: np.dtype | None = None
    offsets: np.dtype | None = None
    buffers: int = 2


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the ids of a feature, or their weights.

    Attributes:
        name: name of the column.
        field: name in error messages, features.F or weights.F.
        value_type: type of the ids or weights.
        offsets: dtype of the offsets of lists; None where all bags have the same number of values.
        size: number of values of each bag if that number is fixed.
        node, buffer: positions of its first node and buffer in a batch.
        value_node, value_buffer: positions of the first node and buffer of its values. They equal
            ``node`` and ``buffer`` where the values are not in lists.
    """

    name: str
    field: str
    value_type: ValueType
    offsets: np.dtype | None
    size: int
    node: int
    buffer: int
    value_node: int
    value_buffer: int

    def wrong(self, problem: str, *place: int) -> InvalidRequestError:
        """Returns the error ``problem`` of the column, or of a bag or a value of a bag at
        ``place``."""
        field = self.field + "".join(f"[{at}]" for at in place)
        return InvalidRequestError(f"{field} {problem}", field)


@dataclass(frozen=True, slots=True)
class ArrowOptions:
    """The response options of a caller."""

    version: str = ""
    output_dtype: str = "float32"
    output_keys: tuple[str, ...] = ()
    columns: str = IN_ONE
    min_seq: int | None = None


PLAIN = ArrowOptions()


@dataclass(frozen=True, eq=False)
class Schema:
    """The columns of a request.

    Attributes:
        features: names of the features, in the caller's order.
        columns: the columns of the features, followed by the columns of weights.
        weights: position of the column of weights, by the position of its feature.
        nodes, buffers: number of nodes and buffers of a batch.
        options: response options of the caller.
    """

    features: tuple[str, ...]
    columns: tuple[Column, ...]
    weights: Mapping[int, int]
    nodes: int
    buffers: int
    options: ArrowOptions

    @cached_property
    def own_nodes(self) -> np.ndarray:
        """First node of each column, int64 [columns]."""
        return np.array([one.node for one in self.columns])

    @cached_property
    def value_nodes(self) -> np.ndarray:
        """Node of the values of each column, int64 [columns]."""
        return np.array([one.value_node for one in self.columns])

    @cached_property
    def is_string(self) -> tuple[bool, ...]:
        """Whether the ids of each feature are strings."""
        of_features = self.columns[: len(self.features)]
        return tuple(one.value_type.offsets is not None for one in of_features)

    @cached_property
    def plain(self) -> tuple[np.dtype, np.dtype] | None:
        """(dtype of ids, dtype of offsets) shared by all columns if they are lists of the same
        integer type without weights; None otherwise, and for uint64."""
        layouts = {(one.offsets, one.value_type.name) for one in self.columns}
        first = self.columns[0]
        ids, offsets = first.value_type.dtype, first.offsets
        if len(layouts) > 1 or self.weights or ids is None or offsets is None:
            return None
        return None if ids == _UINT64 else (ids, offsets)

    def at_buffer(self, buffer: int) -> Column:
        """Returns the column that the buffer at position ``buffer`` belongs to."""
        before = [one for one in self.columns if one.buffer <= buffer]
        return max(before, key=lambda one: one.buffer)


class SchemaTemplate(NamedTuple):
    """The message of a schema at the start of a stream, and the schema."""

    message: bytes
    schema: Schema


class SchemaTemplateCache(TemplateCache[SchemaTemplate]):
    """Cache of the schemas of recent streams."""

    def cache_schema(self, message: bytes, schema: Schema) -> None:
        """Caches ``schema``, whose stream begins with ``message``."""
        if len(message) <= SCHEMA_BYTES_MAX:
            nbytes = len(message) + COLUMN_BYTES * len(schema.columns)
            self.add(SchemaTemplate(message, schema), nbytes)

    def read(self, body: bytes) -> tuple[Schema, int] | None:
        """Returns (the schema at the start of ``body``, its end) if it is cached, else None."""
        for message, schema in self.templates:
            if body.startswith(message):
                return schema, len(message)
        return None
