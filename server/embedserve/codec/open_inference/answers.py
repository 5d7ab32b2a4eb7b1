"""What answers of the Open Inference Protocol are: which tensors, and their bytes.

A pooled model answers [batch, dim] for each key under its name, and `pooled`, [batch, sum(dims)],
for all of them where it is asked for; one that is not pooled [ids, dim] for each key, in the order
sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve.lookup import LookupRequest, LookupResult, OutputOptions
from embedserve.model_info import ModelInfo
from embedserve.model_names import qualified_model_name
from embedserve.shared_memory.memory_slice import MemorySlice

POOLED = "pooled"
"""The output that has the vectors of all keys, one after the other."""
DATATYPES = {4: "FP32", 2: "FP16"}
"""Of outputs, by the bytes of a value."""
OUTPUT_DTYPES = {"FP32": "float32", "FP16": "float16"}
REQUEST_ID_CHARACTERS_MAX = 1024
"""It waits with its request."""
OTHERS_MAX = 64
"""Outputs that are asked for in another form, JSON or binary, than most."""
NOW_BYTES_MAX = 1 << 20
"""Of values that are put in another order, or into shared memory, on the event loop's thread, in
about a millisecond."""
PLACES_MAX = 64
"""Outputs of a request that are asked for in shared memory; they wait with it."""


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How a request wants its answer written.

    Attributes:
        request_id: given back with it.
        has_pooled: `pooled` is asked for.
        has_keys: keys are asked for, too; all of the answer's.
        is_binary: of most outputs, in REST; of gRPC all are raw.
        others: the names of those that are not as most.
        places: of those that are to lie in shared memory, by name; None: none is.
    """

    request_id: str = ""
    has_pooled: bool = False
    has_keys: bool = True
    is_binary: bool = False
    others: frozenset[str] = frozenset()
    places: Mapping[str, MemorySlice] | None = None

    def place(self, name: str) -> MemorySlice | None:
        return None if self.places is None else self.places.get(name)


def set_output(
    request: LookupRequest,
    request_id: str,
    names: Sequence[str],
    are_binary: Sequence[bool],
    is_binary: bool,
    limits: Limits,
    places: Mapping[str, MemorySlice] | None = None,
) -> None:
    """Has ``request`` answered with its id and the outputs of these names, all keys where there are
    none.

    Args:
        are_binary: of each of ``names``; ``is_binary`` is of all where there are none.
        places: of those of ``names`` that are to lie in shared memory.

    Raises:
        InvalidRequestError: the id is too long, or `pooled` is named twice.
        RequestTooLargeError: too many outputs are named, or differ in their form.
    """
    if len(request_id) > REQUEST_ID_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"id has {len(request_id)} characters, the limit is {REQUEST_ID_CHARACTERS_MAX}", "id"
        )
    if not names:
        request.output = OutputOptions(
            form=ResponseOptions(request_id, is_binary=is_binary), field="outputs"
        )
        return
    if len(names) > limits.request_features_max:
        raise RequestTooLargeError(
            f"outputs names {len(names)} tensors, {limits.said('request_features_max')}", "outputs"
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
    if places is not None and len(places) > PLACES_MAX:
        raise RequestTooLargeError(
            f"outputs: {len(places)} are to lie in shared memory, the limit is {PLACES_MAX}: "
            f"ask for {POOLED!r}",
            "outputs",
        )
    form = ResponseOptions(request_id, has_pooled, bool(keys), most, frozenset(others), places)
    request.output = OutputOptions(keys, "outputs", has_pooled, form)


def set_output_dtype(request: LookupRequest, value: object) -> None:
    """As the parameter `output_dtype` of a request says; None where it has none.

    Raises:
        InvalidRequestError: it is none.
    """
    if value is None:
        return
    dtype = OUTPUT_DTYPES.get(value) if isinstance(value, str) else None
    if dtype is None:
        said = repr(value)[:64]
        raise InvalidRequestError(
            f"parameters.output_dtype is {said}, expected 'FP32' or 'FP16'",
            "parameters.output_dtype",
        )
    request.output_dtype = dtype


def versioned(model: str, version: str) -> str:
    """The name under which a version of a model is asked for, "" for the one that answers.

    Raises:
        InvalidRequestError: it can be no version, or ``model`` has one already.
    """
    return qualified_model_name(model, version) if version else model


def response_options_of(result: LookupResult) -> tuple[ResponseOptions, OutputOptions]:
    output = result.output
    assert output is not None
    form = output.form
    assert isinstance(form, ResponseOptions)
    if form.has_pooled and not result.model.is_pooled:
        raise InvalidRequestError(
            f"outputs: model {result.model.name!r} answers one row for each id and pools nothing: "
            f"it has no {POOLED!r}",
            "outputs",
        )
    return form, output


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output: its name, its shape, and where its values lie in those of the answer.

    Attributes:
        columns: of a pooled model's; None: all.
        rows: of a model's that is not pooled.
    """

    name: str
    shape: tuple[int, int]
    columns: slice | None = None
    rows: slice | None = None

    def nbytes(self, itemsize: int) -> int:
        return self.shape[0] * self.shape[1] * itemsize

    def pieces(self, result: LookupResult) -> Iterator[np.ndarray]:
        """Its values, C-contiguous; of several pieces one after the other."""
        for values in (result.values, *result.extra_chunks):
            if self.rows is not None:
                yield values[self.rows]
            elif self.columns is None:
                yield values
            else:
                yield np.ascontiguousarray(values[:, self.columns])


def tensors_of(
    result: LookupResult, form: ResponseOptions, output: OutputOptions
) -> list[OutputTensor]:
    """The outputs, in the model's order."""
    model = result.model
    if result.lengths is not None:
        return _rows_of(result)
    batch_size = len(result.values) + sum(map(len, result.extra_chunks))
    tensors = []
    if form.has_pooled:
        tensors.append(OutputTensor(POOLED, (batch_size, sum(model.length_per_key))))
    if form.has_keys:
        wanted = set(output.keys) if form.has_pooled else None
        start = 0
        for key, dim in zip(model.keys, model.length_per_key, strict=True):
            if wanted is None or key in wanted:
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


def write_placed(
    tensors: Sequence[OutputTensor], result: LookupResult, form: ResponseOptions
) -> None:
    """Puts the values of those of ``tensors`` that are to lie in shared memory there.

    Raises:
        InvalidRequestError: one has more bytes than it may have there, and none is written; or a
            region is gone.
    """
    if form.places is None:
        return
    placed = [(one, form.places[one.name]) for one in tensors if one.name in form.places]
    for one, place in placed:
        nbytes = one.nbytes(result.values.itemsize)
        if nbytes > place.nbytes:
            raise InvalidRequestError(
                f"output {one.name!r} has {nbytes} bytes, and its shared_memory_byte_size is "
                f"{place.nbytes}",
                f"outputs.{one.name}",
            )
    for one, place in placed:
        place.write(values.data for values in one.pieces(result))


def is_quick(result: LookupResult, form: ResponseOptions) -> bool:
    """Whether its values are written as bytes in about a millisecond."""
    if result.extra_chunks or result.lengths is not None or form.places is not None:
        return result.values.nbytes <= NOW_BYTES_MAX and not result.extra_chunks
    return (
        result.values.nbytes <= NOW_BYTES_MAX
        or not form.has_keys
        or (not form.has_pooled and len(result.model.keys) == 1)
    )


def are_in_order(result: LookupResult, form: ResponseOptions) -> bool:
    """Whether the values of all outputs, one after the other, are the answer's as they lie."""
    if result.lengths is not None:
        return True
    if form.has_pooled:
        return not form.has_keys
    return len(result.model.keys) == 1 or (len(result.values) == 1 and not result.extra_chunks)


def start_key(kind: str, result: LookupResult, form: ResponseOptions) -> tuple[object, ...] | None:
    """By what the description of its outputs is kept with the model; None where it is not kept."""
    if result.extra_chunks or result.lengths is not None or form.others or form.places is not None:
        return None
    if form.has_pooled and form.has_keys:
        return None
    shape = result.values.shape[0], result.values.itemsize
    return (kind, *shape, form.has_pooled, form.is_binary)


def keep_start(model: ModelInfo, key: tuple[object, ...] | None, start: object) -> None:
    if key is None:
        return
    if len(model.response_prefix_cache) >= model.response_prefixes_max:
        model.response_prefix_cache.clear()
    model.response_prefix_cache[key] = start
