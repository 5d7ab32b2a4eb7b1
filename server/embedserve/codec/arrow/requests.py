"""Decodes a stream of columns to a LookupRequest.

Offsets, lengths and bitmaps are checked before they are used to read anything. Several record
batches are concatenated to one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, pairwise

import numpy as np

from embedserve.codec.arrow.checks import (
    check_buffer,
    check_sign,
    check_weights,
    wrong_offsets,
    wrong_value,
)
from embedserve.codec.arrow.columns import (
    IN_ONE,
    PLAIN,
    ArrowOptions,
    Column,
    Schema,
    SchemaTemplateCache,
)
from embedserve.codec.arrow.stream import RecordBatch, read_batches, read_schema
from embedserve.codec.string_ids import INLINE_STRINGS_MAX, merge_string_ids
from embedserve.config import DEFAULT_LIMITS, Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve.lookup_types import LookupRequest, OutputOptions, WouldBlockError
from embedserve.model_names import qualified_model_name
from embedserve.request_checks import check_feature_count

_INT64, _INT32, _FLOAT32 = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<f4")
_UINT8 = np.dtype("u1")
BUFFERS_EACH, OFFSETS_AT, VALUES_AT = 4, 1, 3
"""Buffers of each column of lists of numbers, and the positions of its offsets and values among
them."""
INLINE_BAGS_MAX, INLINE_IDS_MAX = 65_536, 262_144
"""Bags and ids of columns that are read on the event loop's thread, in about a millisecond."""
QUICK_BAGS_MAX = 262_144
"""Bags that are read on the event loop's thread if all columns are lists of integers."""
INLINE_TEXT_BYTES_MAX = 64 << 10
"""Bytes of strings that are read on the event loop's thread."""


class ArrowDecoder:
    """Decodes streams of columns. It caches their schemas."""

    def __init__(self) -> None:
        self.schemas = SchemaTemplateCache()

    def decode_request(
        self,
        body: bytes,
        model: str = "",
        limits: Limits = DEFAULT_LIMITS,
        *,
        is_inline: bool = False,
    ) -> LookupRequest:
        """Returns the request in the stream ``body``, addressed to ``model`` ("" for the default
        model).

        Raises:
            InvalidRequestError: the body is not a stream, or its columns are not a batch of jagged
                ids.
            RequestTooLargeError: the stream has more than ``limits`` allow. Raised before it is
                read.
            WouldBlockError: ``is_inline``, and it would take long.
        """
        schema, at = read_schema(body, limits, self.schemas, is_inline=is_inline)
        check_feature_count("features", len(schema.features), limits)
        batches = read_batches(body, at, schema, limits, is_inline=is_inline)
        request = None
        if len(batches) == 1:
            request = _decode_plain(body, model, schema, batches[0], limits)
        if request is None:
            bags = _BagReader(body, schema, limits, is_inline)
            for batch in batches:
                bags.add(batch)
            request = bags.request(model)
        if schema.options is not PLAIN:
            _apply_options(request, schema.options, limits)
        return request

    def estimate_size(self, body: bytes) -> tuple[int, int]:
        """Returns (bags, ids) according to the schema and batches of a stream. Returns (0, 0) for
        an invalid stream, and for a larger schema or more batches than are read inline."""
        bags = ids = 0
        try:
            schema, at = read_schema(body, DEFAULT_LIMITS, self.schemas, is_inline=True)
            features = len(schema.features)
            for batch in read_batches(body, at, schema, DEFAULT_LIMITS, is_inline=True):
                bags += features * batch.rows
                ids += int(batch.lengths[schema.value_nodes[:features]].clip(0, len(body)).sum())
        except (InvalidRequestError, RequestTooLargeError, WouldBlockError):
            return 0, 0
        return min(bags, len(body)), min(ids, len(body))


def _decode_plain(
    body: bytes, model: str, schema: Schema, batch: RecordBatch, limits: Limits
) -> LookupRequest | None:
    """Decodes a batch in the most common layout, lists of integers only. Returns None for a batch
    with over QUICK_BAGS_MAX bags, with nulls, or with anything invalid."""
    rows, dtypes = batch.rows, schema.plain
    if dtypes is None or batch.nulls or rows * len(schema.columns) > QUICK_BAGS_MAX:
        return None
    ids_dtype, offsets_dtype = dtypes
    nbytes = (rows + 1) * offsets_dtype.itemsize
    if min(batch.sizes[OFFSETS_AT::BUFFERS_EACH]) < nbytes:
        return None
    joined = b"".join([body[at : at + nbytes] for at in batch.starts[OFFSETS_AT::BUFFERS_EACH]])
    offsets = np.frombuffer(joined, offsets_dtype).reshape(-1, rows + 1)
    lengths = offsets[:, 1:] - offsets[:, :-1]
    if offsets.min() < 0 or lengths.min() < 0:
        return None
    starts, ends = offsets[:, 0].tolist(), offsets[:, -1].tolist()
    if sum(ends) - sum(starts) > limits.request_ids_max:
        return None
    view, width = memoryview(body), ids_dtype.itemsize
    ids = []
    for at, size, count, start, end in zip(
        batch.starts[VALUES_AT::BUFFERS_EACH],
        batch.sizes[VALUES_AT::BUFFERS_EACH],
        batch.lengths[1::2].tolist(),
        starts,
        ends,
        strict=True,
    ):
        if end > count or count * width > size:
            return None
        ids.append(view[at + start * width : at + end * width])
    integers = np.frombuffer(b"".join(ids), ids_dtype).astype(_INT64, copy=False)
    of_all = lengths.astype(_INT32, copy=False).reshape(-1)
    return LookupRequest(model, schema.features, integers, of_all, None, rows)


def _apply_options(request: LookupRequest, options: ArrowOptions, limits: Limits) -> None:
    """Applies the response options of the caller to ``request``."""
    request.output_dtype = options.output_dtype
    request.min_seq = options.min_seq
    if options.version:
        request.model = qualified_model_name(request.model, options.version)
    if options.output_keys or options.columns != IN_ONE:
        check_feature_count("output_keys", len(options.output_keys), limits)
        request.output = OutputOptions(options.output_keys, format_options=options.columns)


class _BagReader:
    """Collects the contents of each column from the record batches of a stream, in order."""

    def __init__(self, body: bytes, schema: Schema, limits: Limits, is_inline: bool) -> None:
        self._body = body
        self._schema = schema
        self._limits = limits
        self._is_inline = is_inline
        self._lengths: list[np.ndarray] = []
        self._numbers: list[list[np.ndarray]] = [[] for _ in schema.columns]
        self._strings: list[list[str]] = [[] for _ in schema.columns]
        self._ids = self._texts = self._text_bytes = 0

    def add(self, batch: RecordBatch) -> None:
        schema = self._schema
        self._check_bags(batch)
        lengths = np.empty((len(schema.columns), batch.rows), _INT32)
        for at in range(len(schema.columns)):
            self._add_column(at, batch, lengths[at])
        for feature, at in schema.weights.items():
            check_weights(batch, schema.columns[at], lengths[at], lengths[feature])
        self._lengths.append(lengths)

    def _add_column(self, at: int, batch: RecordBatch, lengths: np.ndarray) -> None:
        """Reads the column at position ``at`` and fills ``lengths``, int32 [rows]."""
        column = self._schema.columns[at]
        start, end, offsets = self._value_range(batch, column)
        if at < len(self._schema.features):
            self._count_ids(end - start)
        value_type, dtype = column.value_type, column.value_type.dtype
        if dtype is not None:
            count = int(batch.lengths[column.value_node])  # includes values outside of all bags
            check_buffer(batch, column, column.value_buffer + 1, count * dtype.itemsize)
        if offsets is None:
            lengths[:] = column.size
        else:
            np.subtract(offsets[1:], offsets[:-1], out=lengths, casting="unsafe")
        keep = None
        if batch.nulls or not value_type.buffers:
            keep = self._without_nulls(batch, column, lengths, start, end)
        if value_type.offsets is not None:
            self._strings[at] += self._read_strings(batch, column, start, end, keep, lengths)
        elif dtype is not None:
            first = batch.starts[column.value_buffer + 1] + start * dtype.itemsize
            numbers = np.frombuffer(self._body, dtype, end - start, first)
            numbers = numbers if keep is None else numbers[keep]
            if value_type.name == "uint64":
                check_sign(batch, column, numbers, lengths)
            self._numbers[at].append(numbers)

    def _check_bags(self, batch: RecordBatch) -> None:
        bags = len(self._schema.columns) * (batch.first + batch.rows)
        if self._is_inline and bags > INLINE_BAGS_MAX:
            raise WouldBlockError
        bags_max = len(self._body) // _INT32.itemsize + self._limits.request_ids_max
        if bags > bags_max:  # lists without values, and nulls, take no bytes
            raise RequestTooLargeError(
                f"features has {bags} bags, but {len(self._body)} bytes: of so many the limit is "
                f"{bags_max}, an offset each beside --request-ids-max",
                "features",
            )

    def _value_range(
        self, batch: RecordBatch, column: Column
    ) -> tuple[int, int, np.ndarray | None]:
        """Returns (start of the column's values, their end, offsets of the bags), as positions in
        the array of values.

        Offsets are int32 or int64 [rows + 1]; None for bags of a fixed size.
        """
        rows, count = batch.rows, int(batch.lengths[column.value_node])
        if column.offsets is None:
            if rows * column.size > count:
                raise column.wrong(f"has {count} values, not {column.size} for each of {rows} bags")
            return 0, rows * column.size, None
        check_buffer(batch, column, column.buffer + 1, (rows + 1) * column.offsets.itemsize)
        start = batch.starts[column.buffer + 1]
        offsets = np.frombuffer(self._body, column.offsets, rows + 1, start)
        is_falling = offsets[1:] < offsets[:-1]
        if offsets.min() < 0 or offsets.max() > count or is_falling.any():
            raise wrong_offsets(column, offsets, count)
        return int(offsets[0]), int(offsets[-1]), offsets

    def _count_ids(self, count: int) -> None:
        self._ids += count
        if self._ids > self._limits.request_ids_max:
            raise RequestTooLargeError(
                f"features has {self._ids} ids, {self._limits.describe('request_ids_max')}",
                "features",
            )
        if self._is_inline and self._ids > INLINE_IDS_MAX:
            raise WouldBlockError

    def _without_nulls(
        self, batch: RecordBatch, column: Column, lengths: np.ndarray, start: int, end: int
    ) -> np.ndarray | None:
        """Returns which values are in bags that are not null, bool [end - start]; None where no bag
        is null. Sets the lengths of null bags to 0.

        Raises:
            InvalidRequestError: a value in a bag is null.
        """
        keep = None
        is_flat = column.value_node == column.node
        if (batch.nulls and batch.nulls[column.node]) or (
            is_flat and not column.value_type.buffers
        ):
            is_valid = self._valid(batch, column, column.buffer, 0, batch.rows, is_flat)
            keep = np.repeat(is_valid, lengths)
            lengths[~is_valid] = 0
        if not is_flat and (not column.value_type.buffers or batch.nulls[column.value_node]):
            is_value = self._valid(batch, column, column.value_buffer, start, end, True)
            is_value = is_value if keep is None else is_value[keep]
            if not is_value.all():
                raise wrong_value(batch, column, lengths, int(is_value.argmin()), "is null")
        return keep

    def _valid(
        self, batch: RecordBatch, column: Column, buffer: int, start: int, end: int, of_values: bool
    ) -> np.ndarray:
        """Returns which elements are not null by the bitmap in ``buffer``, bool [end - start].

        Args:
            of_values: whether the elements are values, not lists of them. Values of the null type
                have no bitmap: all are null.
        """
        if of_values and not column.value_type.buffers:
            return np.zeros(end - start, bool)
        first = start // 8
        nbytes = (end + 7) // 8
        check_buffer(batch, column, buffer, nbytes)
        octets = np.frombuffer(self._body, _UINT8, nbytes - first, batch.starts[buffer] + first)
        bits = np.unpackbits(octets, bitorder="little")
        return bits[start - 8 * first : end - 8 * first].astype(bool)

    def _read_strings(
        self,
        batch: RecordBatch,
        column: Column,
        start: int,
        end: int,
        keep: np.ndarray | None,
        lengths: np.ndarray,
    ) -> list[str]:
        dtype, buffer = column.value_type.offsets, column.value_buffer
        assert dtype is not None
        count = int(batch.lengths[column.value_node])
        if not count:  # an array of length 0 may have no offsets
            return []
        check_buffer(batch, column, buffer + 1, (count + 1) * dtype.itemsize)
        of_all = np.frombuffer(self._body, dtype, count + 1, batch.starts[buffer + 1])
        if of_all[0] < 0 or (of_all[1:] < of_all[:-1]).any():
            raise column.wrong("has strings whose offsets are negative, or fall")
        check_buffer(batch, column, buffer + 2, int(of_all[-1]))
        offsets = of_all[start : end + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        self._check_texts(column, end - start, last - first)
        data = self._body[batch.starts[buffer + 2] + first : batch.starts[buffer + 2] + last]
        found = [data[one:next_one] for one, next_one in pairwise((offsets - first).tolist())]
        if keep is not None:
            found = list(compress(found, keep.tolist()))
        try:
            return [one.decode() for one in found]
        except UnicodeDecodeError as error:
            at = found.index(error.object)
            raise wrong_value(batch, column, lengths, at, f"is not UTF-8: {error}") from error

    def _check_texts(self, column: Column, count: int, nbytes: int) -> None:
        """Adds to the counts of strings and of their bytes, and checks them before the strings are
        decoded."""
        self._texts += count
        self._text_bytes += nbytes
        if self._is_inline and (
            self._texts > INLINE_STRINGS_MAX or self._text_bytes > INLINE_TEXT_BYTES_MAX
        ):
            raise WouldBlockError
        for what, found, limit in (
            ("strings", self._texts, "request_values_max"),
            ("bytes of strings", self._text_bytes, "request_text_bytes_max"),
        ):
            if found > getattr(self._limits, limit):
                raise RequestTooLargeError(
                    f"{column.field} and those before have {found} {what}, "
                    f"{self._limits.describe(limit)}",
                    column.field,
                )

    def request(self, model: str) -> LookupRequest:
        """Returns the request of all batches added."""
        schema = self._schema
        if not self._lengths:
            raise InvalidRequestError("features has no examples: an empty batch", "features")
        features = len(schema.features)
        of_batches = [one[:features] for one in self._lengths]
        lengths = of_batches[0] if len(of_batches) == 1 else np.concatenate(of_batches, axis=1)
        ids = _joined(self._numbers[:features], _INT64)
        request = LookupRequest(
            model,
            schema.features,
            ids,
            lengths.astype(_INT32, copy=False).reshape(-1),
            self._weights(lengths) if schema.weights and lengths.any() else None,
            lengths.shape[1],
        )
        if any(schema.is_string):
            strings = [one for of_feature in self._strings[:features] for one in of_feature]
            counts = lengths.sum(axis=1, dtype=np.int64).tolist()
            request.ids, request.strings = merge_string_ids(
                ids, strings, schema.features, schema.is_string, counts
            )
            request.string_features = frozenset(compress(schema.features, schema.is_string))
        return request

    def _weights(self, lengths: np.ndarray) -> np.ndarray:
        """Returns float32 weights, one for each id; 1 where a feature has no weights."""
        given = self._schema.weights
        return _joined(
            [
                self._numbers[given[at]]
                if at in given
                else [np.ones(int(of_feature.sum(dtype=np.int64)), _FLOAT32)]
                for at, of_feature in enumerate(lengths)
            ],
            _FLOAT32,
        )


def _joined(numbers: Sequence[Sequence[np.ndarray]], dtype: np.dtype) -> np.ndarray:
    """Concatenates the arrays of all columns. The result is always a copy, which is aligned."""
    of_all = [one for of_column in numbers for one in of_column]
    with np.errstate(over="ignore"):  # a weight that overflows to infinity is rejected later
        return np.concatenate([np.empty(0, dtype), *of_all], dtype=dtype, casting="unsafe")
