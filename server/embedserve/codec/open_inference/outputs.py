"""Outputs of the Open Inference Protocol: the tensors of a response, and their bytes.

A pooled model returns [batch, dim] for each key, under the key's name. On request it returns
`pooled`, [batch, sum(dims)], with the vectors of all keys. An unpooled model returns [ids, dim] for
each key, in the order of the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve.lookup_types import LookupRequest, LookupResult, OutputOptions
from embedserve.model_names import qualified_model_name
from embedserve.shared_memory.region import MemorySlice

POOLED = "pooled"
"""Name of the output with the vectors of all keys, one after the other."""
OUTPUT_DATATYPES = {4: "FP32", 2: "FP16"}
"""Datatypes of outputs, by the bytes of a value."""
OUTPUT_DTYPES = {"FP32": "float32", "FP16": "float16"}
REQUEST_ID_CHARACTERS_MAX = 1024
"""Characters of a request id, which stays in memory while its request waits."""
OTHERS_MAX = 64
"""Outputs requested in the less frequent format, JSON or binary, of a request."""
INLINE_OUTPUT_BYTES_MAX = 1 << 20
"""Bytes of values that are reordered on the event loop's thread, in about a millisecond."""
MIN_SEQ = "parameters.min_seq"
"""Parameter of a request with the least seq that its rows may have."""
SEQ = "seq"
"""Parameter of a response with the seq of its rows."""
UNKNOWN_IDS = "unknown_ids."
"""Prefix of the parameters of a response that count unknown ids."""
MISSING_IDS = "missing_ids."
"""Prefix of the parameters of a response that count ids whose rows no server could look up."""
LOCATIONS_MAX = 64
"""Outputs of a request in shared memory. Their locations stay in memory while the request waits."""


class ResponseOptions(msgspec.Struct, frozen=True):
    """Requested format of a response.

    Attributes:
        request_id: id that the response repeats.
        has_pooled: whether `pooled` is requested.
        has_keys: whether keys are requested, too; the response then has them all.
        is_binary: whether most outputs are binary, in REST. In gRPC all outputs are raw.
        others: names of the outputs in the opposite format.
        locations: locations of the outputs in shared memory, by name; None where there are none.
    """

    request_id: str = ""
    has_pooled: bool = False
    has_keys: bool = True
    is_binary: bool = False
    others: frozenset[str] = frozenset()
    locations: Mapping[str, MemorySlice] | None = None

    def location(self, name: str) -> MemorySlice | None:
        return None if self.locations is None else self.locations.get(name)


ALL_KEYS = ResponseOptions()
"""Options of a response with the vectors of all its keys, and no other output."""


def set_output(
    request: LookupRequest,
    request_id: str,
    names: Sequence[str],
    are_binary: Sequence[bool],
    is_binary: bool,
    limits: Limits,
    locations: Mapping[str, MemorySlice] | None = None,
) -> None:
    """Sets the response options of ``request``: its id and the outputs with these names. Without
    names, all keys are returned.

    Args:
        are_binary: whether each of ``names`` is binary.
        is_binary: whether all outputs are binary, where there are no ``names``.
        locations: locations of the outputs in shared memory, by name.

    Raises:
        InvalidRequestError: the id is too long, or `pooled` is named twice.
        RequestTooLargeError: too many outputs are named, are in the less frequent format, or are in
            shared memory.
    """
    if len(request_id) > REQUEST_ID_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"id has {len(request_id)} characters, the limit is {REQUEST_ID_CHARACTERS_MAX}", "id"
        )
    if not names:
        request.output = OutputOptions(
            format_options=ResponseOptions(request_id, is_binary=is_binary), field="outputs"
        )
        return
    if len(names) > limits.request_features_max:
        raise RequestTooLargeError(
            f"outputs names {len(names)} tensors, {limits.describe('request_features_max')}",
            "outputs",
        )
    keys = tuple(names)
    has_pooled = POOLED in keys
    if has_pooled:
        keys = tuple(name for name in names if name != POOLED)
        if len(keys) < len(names) - 1:
            raise InvalidRequestError(f"outputs names {POOLED!r} twice", "outputs")
    most = sum(are_binary) * 2 >= len(names)
    others = [name for name, one in zip(names, are_binary, strict=True) if one != most]
    if len(others) > OTHERS_MAX:
        raise RequestTooLargeError(
            f"outputs: {len(others)} of {len(names)} have another binary_data than the others, "
            f"the limit is {OTHERS_MAX}",
            "outputs",
        )
    if locations is not None and len(locations) > LOCATIONS_MAX:
        raise RequestTooLargeError(
            f"outputs: {len(locations)} are requested in shared memory, the limit is "
            f"{LOCATIONS_MAX}: ask for {POOLED!r}",
            "outputs",
        )
    options = ResponseOptions(
        request_id, has_pooled, bool(keys), most, frozenset(others), locations
    )
    request.output = OutputOptions(keys, "outputs", has_pooled, options, locations is not None)


def classification_error(name: str) -> InvalidRequestError:
    """Returns the error of a request that asks for the classes of the output ``name``."""
    return InvalidRequestError(
        f"outputs: {name[:200]!r} asks for a classification, which is not supported", "outputs"
    )


def set_output_dtype(request: LookupRequest, value: object) -> None:
    """Sets the dtype of the response from the request's parameter `output_dtype`; None if absent.

    Raises:
        InvalidRequestError: the value is not a supported datatype.
    """
    if value is None:
        return
    dtype = OUTPUT_DTYPES.get(value) if isinstance(value, str) else None
    if dtype is None:
        shown = repr(value)[:64]
        raise InvalidRequestError(
            f"parameters.output_dtype is {shown}, expected 'FP32' or 'FP16'",
            "parameters.output_dtype",
        )
    request.output_dtype = dtype


def versioned(model: str, version: str) -> str:
    """Returns the qualified name of a version of ``model``, or ``model`` itself if ``version`` is
    "".

    Raises:
        InvalidRequestError: ``version`` is not a valid version, or ``model`` already includes a
            version.
    """
    return qualified_model_name(model, version) if version else model


def response_options_of(result: LookupResult) -> ResponseOptions:
    """Returns the options that ``set_output`` stored with the request of ``result``.

    Raises:
        InvalidRequestError: `pooled` is requested of a model that does not pool.
    """
    assert result.output is not None
    options = result.output.format_options
    assert isinstance(options, ResponseOptions)
    if options.has_pooled and not result.model.is_pooled:
        raise InvalidRequestError(
            f"outputs: model {result.model.name!r} answers one row for each id and pools nothing: "
            f"it has no {POOLED!r}",
            "outputs",
        )
    return options


def parameters_of(result: LookupResult) -> dict[str, int]:
    """Returns the parameters of the response: counts of unknown and of missing ids, and the seq of
    its rows."""
    unknown, missing = result.unknown_ids or {}, result.missing_ids or {}
    parameters = {UNKNOWN_IDS + feature: count for feature, count in unknown.items()}
    parameters |= {MISSING_IDS + feature: count for feature, count in missing.items()}
    if result.seq is not None:
        parameters[SEQ] = result.seq
    return parameters


class OutputTensor(msgspec.Struct, frozen=True):
    """An output: its name, its shape, and the position of its values among those of the result.

    Attributes:
        columns: columns of a pooled model's values; None for all columns.
        rows: rows of an unpooled model's values; None for a pooled model.
    """

    name: str
    shape: tuple[int, int]
    columns: slice | None = None
    rows: slice | None = None

    def nbytes(self, itemsize: int) -> int:
        return self.shape[0] * self.shape[1] * itemsize

    def chunks(self, result: LookupResult) -> Iterator[np.ndarray]:
        """Yields the values, C-contiguous. A result in several chunks yields several arrays in
        order."""
        for values in (result.values, *result.extra_chunks):
            if self.rows is not None:
                yield values[self.rows]
            elif self.columns is None:
                yield values
            else:
                yield np.ascontiguousarray(values[:, self.columns])


def tensors_of(result: LookupResult, options: ResponseOptions = ALL_KEYS) -> list[OutputTensor]:
    """Returns the outputs of the response, in the model's order."""
    model = result.model
    if result.lengths is not None:
        return _rows_of(result)
    batch_size = len(result.values) + sum(map(len, result.extra_chunks))
    tensors = []
    if options.has_pooled:
        tensors.append(OutputTensor(POOLED, (batch_size, sum(model.length_per_key))))
    if options.has_keys:
        requested = set(result.output.keys) if options.has_pooled and result.output else None
        start = 0
        for key, dim in zip(model.keys, model.length_per_key, strict=True):
            if requested is None or key in requested:
                tensors.append(OutputTensor(key, (batch_size, dim), slice(start, start + dim)))
            start += dim
    return tensors


def _rows_of(result: LookupResult) -> list[OutputTensor]:
    model, lengths = result.model, result.lengths
    assert lengths is not None
    tensors, start = [], 0
    counts = lengths.sum(axis=1, dtype=np.int64).tolist()
    for key, dim, count in zip(model.keys, model.length_per_key, counts, strict=True):
        tensors.append(OutputTensor(key, (count, dim), rows=slice(start, start + count)))
        start += count
    return tensors


def write_to_shared_memory(
    tensors: Sequence[OutputTensor], result: LookupResult, options: ResponseOptions
) -> None:
    """Writes the values of the outputs that are requested in shared memory.

    Raises:
        InvalidRequestError: an output has more bytes than its location, or two overlap, and nothing
            is written; or a region no longer exists.
    """
    if options.locations is None:
        return
    located = [
        (one, options.locations[one.name]) for one in tensors if one.name in options.locations
    ]
    spans = []
    for one, location in located:
        nbytes = one.nbytes(result.values.itemsize)
        start = location.region.offset + location.offset
        spans.append((location.region.file, start, start + nbytes, one.name))
        if nbytes > location.nbytes:
            raise InvalidRequestError(
                f"output {one.name!r} has {nbytes} bytes, and its shared_memory_byte_size is "
                f"{location.nbytes}",
                f"outputs.{one.name}",
            )
    spans.sort()
    for (file, _, end, name), (next_file, start, _, next_name) in pairwise(spans):
        if file == next_file and start < end:
            raise InvalidRequestError(
                f"outputs {name!r} and {next_name!r} overlap in shared memory",
                f"outputs.{next_name}",
            )
    for one, location in located:
        location.write(values.data for values in one.chunks(result))


def is_quick(result: LookupResult, options: ResponseOptions) -> bool:
    """Returns whether the values are encoded as bytes in about a millisecond. A write to shared
    memory waits for the kernel's lock of the file, which its owner can hold for seconds."""
    if options.locations is not None or result.extra_chunks:
        return False
    if result.values.nbytes <= INLINE_OUTPUT_BYTES_MAX:
        return True
    has_one_output = not options.has_keys or (
        not options.has_pooled and len(result.model.keys) == 1
    )
    return result.lengths is None and has_one_output


def are_in_order(result: LookupResult, options: ResponseOptions) -> bool:
    """Returns whether the values of all outputs, in order, are the result's values as they are in
    memory."""
    if result.lengths is not None:
        return True
    if options.has_pooled:
        return not options.has_keys
    return len(result.model.keys) == 1 or (len(result.values) == 1 and not result.extra_chunks)


def prefix_key(
    kind: str, result: LookupResult, options: ResponseOptions
) -> tuple[object, ...] | None:
    """Returns the key under which the encoded outputs are cached with the model; None where they
    are not cached."""
    if (
        result.extra_chunks
        or result.lengths is not None
        or options.others
        or options.locations is not None
    ):
        return None
    if options.has_pooled and options.has_keys:
        return None
    shape = result.values.shape[0], result.values.itemsize
    return (kind, *shape, options.has_pooled, options.is_binary)
