"""Parses the schema message of a request's stream.

A column has the ids of a feature, or is named F.weights and has the weights of feature F. Its bags
are lists in any of Arrow's plain layouts, or one value each. Response options are metadata with
embedserve's prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice

import msgspec
import numpy as np

from embedserve.codec.arrow.columns import (
    BY_KEY,
    IN_ONE,
    PLAIN,
    ArrowOptions,
    Column,
    Schema,
    ValueType,
)
from embedserve.codec.arrow.flatbuffers import INT16, INT32, MALFORMED, UINT8, FlatTable
from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve.lookup_types import WouldBlockError
from embedserve.request_checks import check_feature_count, parse_min_seq

WEIGHTS = ".weights"
"""Suffix that turns the name of a feature into the name of its column of weights."""
PREFIX = "embedserve."
"""Prefix of the metadata keys that set response options. Other metadata is ignored."""
NAME_BYTES_MAX = 1024
INLINE_COLUMNS_MAX = 32
"""Columns of a schema that is parsed on the event loop's thread, in a millisecond or two."""
METADATA_MAX, METADATA_BYTES_MAX = 64, 64 << 10
"""Metadata entries of a schema, and bytes of the value of an entry with embedserve's prefix."""

# Field numbers of the tables Schema, Field and KeyValue (arrow/format/Schema.fbs).
_ENDIANNESS, FIELDS, METADATA = 0, 1, 2
NAME, TYPE_KIND, TYPE, DICTIONARY, CHILDREN = 0, 2, 3, 4, 5
KEY, VALUE = 0, 1
NULL, INT, FLOAT, UTF8, LIST, FIXED_SIZE_LIST, LARGE_UTF8, LARGE_LIST = 1, 2, 3, 5, 12, 16, 20, 21
TYPE_KINDS = (
    *("none", "null", "int", "float", "binary", "utf8", "bool", "decimal", "date", "time"),
    *("timestamp", "interval", "list", "struct", "union", "fixed_size_binary", "fixed_size_list"),
    *("map", "duration", "large_binary", "large_utf8", "large_list", "run_end_encoded"),
    *("binary_view", "utf8_view", "list_view", "large_list_view"),
)
"""Names of Arrow's types, by their numbers."""
_VIEWS = ("binary_view", "utf8_view", "list_view", "large_list_view")
_INT32, _INT64 = np.dtype("<i4"), np.dtype("<i8")
_LISTS: Mapping[int, np.dtype] = {LIST: _INT32, LARGE_LIST: _INT64}
_TEXTS: Mapping[int, np.dtype] = {UTF8: _INT32, LARGE_UTF8: _INT64}
FLOATS = ("float16", "float32", "float64")
"""Names of the floating-point types, by their precision."""
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_NUMBERS = {name: np.dtype(name).newbyteorder("<") for name in (*_INTEGERS, *FLOATS)}


def malformed(problem: object) -> InvalidRequestError:
    return InvalidRequestError(f"body is not an Arrow stream: {problem}", "body")


def parse(table: FlatTable, limits: Limits, *, is_inline: bool) -> Schema:
    """Returns the schema in ``table``.

    Raises:
        InvalidRequestError: ``table`` is not a schema, or its columns are not bags of ids.
        RequestTooLargeError: it has more columns than ``limits`` allow, or more metadata than the
            bounds of this module.
        WouldBlockError: ``is_inline``, and it has over INLINE_COLUMNS_MAX columns.
    """
    try:
        if is_inline and table.size(FIELDS) > INLINE_COLUMNS_MAX:
            raise WouldBlockError
        return _schema(table, limits)
    except MALFORMED as error:
        raise malformed(f"its schema cannot be read: {error}") from error


def _schema(table: FlatTable, limits: Limits) -> Schema:
    if table.number(_ENDIANNESS, INT16):
        raise InvalidRequestError("body has big-endian numbers: send little-endian ones", "body")
    count = table.size(FIELDS)
    if count > 2 * limits.request_features_max:  # each with its weights
        check_feature_count("features", count, limits)
    columns = _columns(table)
    if not columns:
        raise InvalidRequestError("features: there are no columns", "features")
    weights = _weights(columns)
    names = {one.name for one in weights.values()}
    features = {name: one for name, one in columns.items() if name not in names}
    for column in features.values():
        _check_ids(column)
    for name, column in weights.items():
        if name not in features:
            raise column.wrong(f"has no column {name!r} of ids beside it")
    places = {name: at for at, name in enumerate(features)}
    weights_at = {places[name]: len(features) + at for at, name in enumerate(weights)}
    last = max(columns.values(), key=lambda one: one.value_node)
    return Schema(
        tuple(features),
        (*features.values(), *weights.values()),
        weights_at,
        last.value_node + 1,
        last.value_buffer + last.value_type.buffers,
        _options(table),
    )


def _columns(table: FlatTable) -> dict[str, Column]:
    """Returns all columns by name, in their order."""
    columns: dict[str, Column] = {}
    nodes = buffers = 0
    for at, one in enumerate(table.tables(FIELDS)):
        column = _column(at, one, nodes, buffers)
        if column.name in columns:
            raise column.wrong("is two columns of one name")
        columns[column.name] = column
        nodes = column.value_node + 1
        buffers = column.value_buffer + column.value_type.buffers
    return columns


def _weights(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Returns the columns of weights, by the names of their features."""
    found = {}
    for name, one in columns.items():
        feature = name.removesuffix(WEIGHTS)
        if feature != name and feature in columns:
            found[feature] = column = replace(one, field=f"weights.{feature}")
            if column.value_type.name not in FLOATS:
                raise column.wrong(f"are of type {column.value_type.name}, expected floats")
    return found


def _check_ids(column: Column) -> None:
    """Raises InvalidRequestError if ``column``, which has no weights, has floats."""
    name = column.value_type.name
    if name in FLOATS:
        feature = column.name.removesuffix(WEIGHTS)
        is_same = feature == column.name
        beside = "" if is_same else f", and there is no column {feature!r} that it weighs"
        raise column.wrong(f"is of type {name}: ids are integers or strings{beside}")


def _column(at: int, table: FlatTable, node: int, buffer: int) -> Column:
    """Returns the column at position ``at``. Its nodes start at ``node`` and its buffers at
    ``buffer``."""
    size = table.size(NAME)
    if size > NAME_BYTES_MAX:
        raise RequestTooLargeError(
            f"features: column {at} has a name of {size} bytes, the limit is {NAME_BYTES_MAX}",
            "features",
        )
    name = table.text(NAME)
    field, kind = f"features.{name}", table.number(TYPE_KIND, UINT8)
    if kind not in _LISTS and kind != FIXED_SIZE_LIST:
        return Column(name, field, _value_type(field, table), None, 1, node, buffer, node, buffer)
    if table.table(DICTIONARY) is not None:
        raise _wrong_type(field, "dictionary")
    children = list(islice(table.tables(CHILDREN), 2))
    if len(children) != 1:
        raise ValueError(f"the lists of {name!r} have values of {table.size(CHILDREN)} types")
    values = _value_type(field, children[0])
    if kind in _LISTS:
        return Column(name, field, values, _LISTS[kind], 0, node, buffer, node + 1, buffer + 2)
    list_type = table.table(TYPE)
    size = 0 if list_type is None else list_type.number(0, INT32)
    if size < 0:
        raise ValueError(f"the lists of {name!r} have {size} values")
    return Column(name, field, values, None, size, node, buffer, node + 1, buffer + 1)


def _value_type(field: str, table: FlatTable) -> ValueType:
    """Returns the type of values that are not lists."""
    kind, parameters = table.number(TYPE_KIND, UINT8), table.table(TYPE)
    name = TYPE_KINDS[kind] if kind < len(TYPE_KINDS) else f"{kind}"
    if table.table(DICTIONARY) is not None:
        name = "dictionary"
    elif kind == NULL:
        return ValueType(name, buffers=0)
    elif kind in _TEXTS:
        return ValueType(name, offsets=_TEXTS[kind], buffers=3)
    elif kind == INT and parameters is not None:
        sign = "" if parameters.number(1, UINT8) else "u"
        name = f"{sign}int{parameters.number(0, INT32)}"
    elif kind == FLOAT and parameters is not None:
        precision = parameters.number(0, INT16)
        name = FLOATS[precision] if 0 <= precision < len(FLOATS) else name
    if name in _NUMBERS:
        return ValueType(name, _NUMBERS[name])
    raise _wrong_type(field, name)


def _wrong_type(field: str, name: str) -> InvalidRequestError:
    hint = ", without views (polars: compat_level=CompatLevel.oldest())" if name in _VIEWS else ""
    return InvalidRequestError(
        f"{field} is of type {name}: send lists of integers or of strings (utf8){hint}", field
    )


def _options(table: FlatTable) -> ArrowOptions:
    """Returns the response options in the metadata with embedserve's prefix."""
    count = table.size(METADATA)
    if count > METADATA_MAX:
        raise RequestTooLargeError(
            f"metadata has {count} entries, the limit is {METADATA_MAX}", "metadata"
        )
    found: dict[str, object] = {}
    for one in table.tables(METADATA):
        key = one.text(KEY) if one.size(KEY) <= NAME_BYTES_MAX else ""
        if key.startswith(PREFIX):
            found[key.removeprefix(PREFIX)] = _option(key, one)
    return ArrowOptions(**found) if found else PLAIN  # type: ignore[arg-type]  # as in _READERS


def _option(key: str, entry: FlatTable) -> object:
    reader = _READERS.get(key.removeprefix(PREFIX))
    if reader is None:
        known = ", ".join(PREFIX + name for name in _READERS)
        raise InvalidRequestError(f"metadata {key!r} is none of {known}", key)
    size = entry.size(VALUE)
    if size > METADATA_BYTES_MAX:
        raise RequestTooLargeError(
            f"{key} has {size} bytes, the limit is {METADATA_BYTES_MAX}", key
        )
    return reader(key, entry.text(VALUE))


def _one_of(*names: str) -> Callable[[str, str], str]:
    def read(key: str, value: str) -> str:
        if value not in names:
            raise InvalidRequestError(
                f"{key} is {value[:64]!r}, expected {' or '.join(map(repr, names))}", key
            )
        return value

    return read


def _keys(key: str, value: str) -> tuple[str, ...]:
    try:
        return tuple(msgspec.json.decode(value, type=list[str]))
    except msgspec.DecodeError as error:
        raise InvalidRequestError(
            f"{key} is {value[:64]!r}, expected a JSON list of keys: {error}", key
        ) from error


_READERS: Mapping[str, Callable[[str, str], object]] = {
    "version": lambda _, value: value,
    "output_dtype": _one_of("float32", "float16"),
    "output_keys": _keys,
    "columns": _one_of(IN_ONE, BY_KEY),
    "min_seq": parse_min_seq,
}
"""Parsers of metadata values, by the attribute of ArrowOptions that they set."""
