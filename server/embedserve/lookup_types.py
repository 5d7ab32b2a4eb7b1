"""Types of a lookup, from the decoded request to its result: plain values and numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from embedserve.call_trace import CallTrace
from embedserve.deltas.rows_reader import BatchView
from embedserve.errors import EmbedServeError
from embedserve.model_info import ModelInfo

ResponseChunks = Sequence[bytes | memoryview]
"""Chunks of an encoded response, in order. Chunks with values are views of the batch's array, not
copies."""
EncodedResponse = tuple[ResponseChunks, int]
"""(chunks of an encoded response, their total bytes)."""
_NO_COUNTS = np.empty(0, np.int64)


def with_size(chunks: ResponseChunks) -> EncodedResponse:
    return chunks, sum(memoryview(chunk).nbytes for chunk in chunks)


class WouldBlockError(Exception):
    """Raised where a body would take too long to decode on the event loop's thread."""


class OutputOptions(msgspec.Struct, frozen=True):
    """Response options: which keys to return, and format options for the codec.

    A request without any has None in place of this object, and gets the full default response.

    Attributes:
        keys: requested keys, in any order; empty for all keys.
        field: request field that names the keys, for error messages.
        has_all: whether the response has the vectors of all keys; ``keys`` are then only validated.
        format_options: options of the codec that writes the response. They are small, as they are
            held with the queued request.
        may_block: whether encoding writes to shared memory, whose owner can make a write wait.
    """

    keys: tuple[str, ...] = ()
    field: str = "output_keys"
    has_all: bool = False
    format_options: object = None
    may_block: bool = False


class StringIds(Protocol):
    """String ids of one request."""

    @property
    def integers(self) -> Mapping[str, np.ndarray | int]:
        """Values of string ids that are integers, by feature: int64 [n]. A feature with another
        string has the position of its first such id instead."""

    def __getitem__(self, value: int) -> str:
        """Returns the string whose hash is ``value``."""


class LookupRequest(msgspec.Struct):
    """One caller's batch of jagged ids, as decoded by a codec.

    Attributes:
        model: name of the model, with a version or without; "" for the default model.
        features: KJT keys in the caller's order, each once; empty for all features of the model in
            its order. Once adapt_to_model has returned the request, those of the model.
        ids: int64 [n], the bags one after the other, feature-major; hashes in place of string ids.
        lengths: int32 [len(features) * batch_size], feature-major.
        weights: float32 [n], or None to count every id once.
        batch_size: number of examples B, at least 1.
        string_features: features whose ids were sent as strings.
        strings: the string ids by their hashes, for error messages, and their values as integers,
            for tables with integer ids; None without string ids.
        output_dtype: requested dtype of the response's values, "float32" or "float16".
        output: response options; None, as in most requests, for the full default response.
        min_seq: smallest seq that the rows of the response may have; None for any.
    """

    model: str
    features: tuple[str, ...]
    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    batch_size: int
    string_features: frozenset[str] = frozenset()
    strings: StringIds | None = None
    output_dtype: str = "float32"
    output: OutputOptions | None = None
    min_seq: int | None = None

    def response_bytes(self, model: ModelInfo) -> int:
        """Returns the bytes of the float32 values in ``model``'s result; an upper bound if it is
        unpooled."""
        return (
            self.batch_size * model.response_bytes_per_example
            + self.ids.size * model.response_bytes_per_id
        )


class LookupResult(msgspec.Struct):
    """The vectors of one request.

    Attributes:
        model: version that served the request; restricted to the selected keys if the response has
            only some keys.
        values: float32 or float16, as requested; C-contiguous, and a slice of the batch's array.
            [B, sum(model.length_per_key)]; for an unpooled model [sum(lengths), dim], one row per
            id, key after key.
        unknown_ids: number of ids without a row, by feature; None if all ids had a row.
        lengths: int32 [keys, B] for an unpooled model, else None.
        extra_chunks: remaining rows if the batch was looked up in chunks; ``values`` then has only
            the first rows. The chunks are written one after the other, as joining them would copy
            them all.
        output: response options of the request.
        seq: seq of the last delta in the rows; None for a version that follows no deltas.
        missing_ids: number of ids whose rows no server could look up, by feature; ``values`` lack
            them. None if there are none.
    """

    model: ModelInfo
    values: np.ndarray
    unknown_ids: Mapping[str, int] | None = None
    lengths: np.ndarray | None = None
    extra_chunks: Sequence[np.ndarray] = ()
    output: OutputOptions | None = None
    seq: int | None = None
    missing_ids: Mapping[str, int] | None = None


class Batch(msgspec.Struct):
    """The engine's input for several requests, and data for splitting its result.

    Attributes:
        ids: int64 [n] row numbers, feature-major over the whole batch.
        lengths: int32 [F * B], feature-major; the examples are in the order of the requests.
        weights: float32 [n], or None if no request has weights.
        sizes: number of examples of each request.
        batch_size: number of examples of all requests, B.
        ids_per_feature: int64 [F] number of requested ids, including ids without a row. Empty for
            a batch that was split off another.
        unknown_counts: int64 [requests, F] number of ids without a row; None if all ids had a row.
        skipped: positions in ``ids`` of skipped ids, for an unpooled model, which returns rows of
            zeros for them. The batch of a pooled model no longer contains them.
        view: view of the rows that is looked up; None for a version whose rows never change.
        failures: indices of examples that could not be looked up, and the reason, for a lookup that
            several servers answer. Their values are not to be used.
        missing_counts: int64 [requests, F] number of ids whose rows no server could look up, where
            the values may lack them; None if there are none.
        missing_parts: parts of the tables whose rows the values may lack.
        cached_count: number of ids whose rows were in the row cache of a router.
        calls: record of the calls of other servers; None if no request of the batch is traced.
    """

    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    sizes: list[int]
    batch_size: int
    ids_per_feature: np.ndarray = _NO_COUNTS
    unknown_counts: np.ndarray | None = None
    skipped: np.ndarray | None = None
    view: BatchView | None = None
    failures: Sequence[tuple[np.ndarray, EmbedServeError]] = ()
    missing_counts: np.ndarray | None = None
    missing_parts: Sequence[int] = ()
    cached_count: int = 0
    calls: CallTrace | None = None

    def resolve_rows(self) -> np.ndarray:
        """Returns ``ids`` as the numbers of their rows in ``view``.

        Raises:
            StoreError: as RowsReader.rows_in_view.
        """
        if self.view is None:
            return self.ids
        counts = self.ids_per_feature
        if self.unknown_counts is not None:  # skipped ids may be gone
            counts = self.lengths.reshape(len(counts), -1).sum(axis=1)
        return self.view.reader.rows_in_view(self.ids, counts, self.view.number)

    @property
    def is_whole(self) -> bool:
        """Whether every example was looked up, with all its rows."""
        return not self.failures and self.missing_counts is None
