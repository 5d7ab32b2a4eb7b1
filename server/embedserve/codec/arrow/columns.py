"""What a request's schema says: its columns, where batches hold them, and what is wanted back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from embedserve.errors import InvalidRequestError

BY_KEY, IN_ONE = "keys", "values"
"""The columns of an answer: one for each key, or one that has the vectors of all."""
KNOWN_MAX, KNOWN_BYTES_MAX, MESSAGE_BYTES_MAX = 16, 4 << 20, 1 << 20
"""Schemas that are remembered, the bytes of all of them, and of the message of one."""
COLUMN_BYTES = 640
"""Of one that is remembered, beside its schema's message."""
_UINT64 = np.dtype("<u8")


class WouldBlockError(Exception):
    """What is sent is not to be read on the event loop's thread."""


@dataclass(frozen=True, slots=True)
class Values:
    """The type of ids or weights.

    Attributes:
        name: Arrow's.
        dtype: of numbers; None of anything else.
        offsets: of strings, the dtype of their offsets; None of anything else.
        buffers: that they take in a batch.
    """

    name: str
    dtype: np.dtype | None = None
    offsets: np.dtype | None = None
    buffers: int = 2


@dataclass(frozen=True, slots=True)
class Column:
    """A feature's ids, or their weights.

    Attributes:
        name: of it.
        field: as messages have it, features.F or weights.F.
        offsets: of lists, the dtype of their offsets; None where all bags have as many values.
        size: that many.
        node, buffer: its first ones in a batch.
        value_node, value_buffer: those of its values; the same ones where they are in no lists.
    """

    name: str
    field: str
    values: Values
    offsets: np.dtype | None
    size: int
    node: int
    buffer: int
    value_node: int
    value_buffer: int

    def wrong(self, problem: str, *place: int) -> InvalidRequestError:
        """What is said of it, or of the bag, or the value of a bag, at ``place``."""
        field = self.field + "".join(f"[{at}]" for at in place)
        return InvalidRequestError(f"{field} {problem}", field)


@dataclass(frozen=True, slots=True)
class Plain:
    """The dtypes of lists, of their ids and of their offsets."""

    ids: np.dtype
    offsets: np.dtype


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller wants of the answer."""

    version: str = ""
    output_dtype: str = "float32"
    output_keys: tuple[str, ...] = ()
    columns: str = IN_ONE


PLAIN = Options()


@dataclass(frozen=True, eq=False)
class Schema:
    """The columns of a request.

    Attributes:
        features: their names, in the caller's order.
        columns: of each feature, and then those of weights.
        weights: where among them those of a feature are that has some, by where it is.
        nodes, buffers: how many a batch has.
    """

    features: tuple[str, ...]
    columns: tuple[Column, ...]
    weights: Mapping[int, int]
    nodes: int
    buffers: int
    options: Options

    @cached_property
    def own_nodes(self) -> np.ndarray:
        """int64 [columns]."""
        return np.array([one.node for one in self.columns])

    @cached_property
    def value_nodes(self) -> np.ndarray:
        """int64 [columns]."""
        return np.array([one.value_node for one in self.columns])

    @cached_property
    def is_string(self) -> tuple[bool, ...]:
        """Of each feature."""
        of_features = self.columns[: len(self.features)]
        return tuple(one.values.offsets is not None for one in of_features)

    @cached_property
    def plain(self) -> Plain | None:
        """Of columns that are all alike lists of integers, and no weights; None of others."""
        forms = {(one.offsets, one.values.name) for one in self.columns}
        first = self.columns[0]
        ids, offsets = first.values.dtype, first.offsets
        if len(forms) > 1 or self.weights or ids is None or offsets is None:
            return None
        return None if ids == _UINT64 else Plain(ids, offsets)

    def at_buffer(self, buffer: int) -> Column:
        """The column that has this one."""
        before = [one for one in self.columns if one.buffer <= buffer]
        return max(before, key=lambda one: one.buffer)


class SchemaCache:
    """Those met before, by the bytes of their messages: callers send the same over and over.

    Attributes:
        sizes: of these messages, so that no other is looked for.
        nbytes: that all of them take.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, Schema] = {}
        self.sizes: set[int] = set()
        self.nbytes = 0

    def forget(self) -> None:
        self.known, self.sizes, self.nbytes = {}, set(), 0

    def remember(self, message: bytes, schema: Schema) -> None:
        nbytes = len(message) + COLUMN_BYTES * len(schema.columns)
        if len(message) > MESSAGE_BYTES_MAX or nbytes > KNOWN_BYTES_MAX:
            return
        if len(self.known) >= KNOWN_MAX or self.nbytes + nbytes > KNOWN_BYTES_MAX:
            self.forget()
        self.known[message] = schema
        self.sizes.add(len(message))
        self.nbytes += nbytes


schemas = SchemaCache()
