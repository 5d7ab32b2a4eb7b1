"""Tensors that lie in shared memory: where, as a request's parameters say it, and their bytes.

What is read is a copy, which the rest of the codec treats as what came in a body, and bounds alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from embedserve.codec.open_inference.strings import read_strings
from embedserve.codec.open_inference.tensors import BYTES, NAME_CHARACTERS_MAX, InputTensor, shown
from embedserve.config import Limits
from embedserve.errors import (
    EmbedServeError,
    InvalidRequestError,
    RequestTooLargeError,
    UnknownRegionError,
)
from embedserve.shared_memory.memory_slice import MemorySlice
from embedserve.shared_memory.region import Regions
from embedserve_proto import open_inference_pb2 as pb

REGION = "shared_memory_region"
BYTE_SIZE = "shared_memory_byte_size"
OFFSET = "shared_memory_offset"
"""Parameters of an input or an output."""
NOW_BYTES_MAX = 1 << 20
"""That are read on the event loop's thread, in some tenths of a millisecond."""
NOW_TEXT_BYTES_MAX = 64 << 10
"""Of them, of strings."""
NOW_TENSORS_MAX = 128
_Parameters = Mapping[str, pb.InferParameter]
PlacedTensor = tuple[InputTensor, MemorySlice]


def find_place(
    tensor: InputTensor | str,
    region: str | None,
    byte_size: int | None,
    offset: int,
    regions: Regions | None,
) -> MemorySlice:
    """Where ``tensor`` lies, an input or the name of an output.

    Args:
        regions: of the caller; None: the server has none.

    Raises:
        InvalidRequestError: it is not said in full, or reaches past the region's end.
        UnknownRegionError: the caller has no such region.
    """
    if regions is None:
        problem = "is to lie in shared memory, which this server does not use (--shared-memory)"
        raise _error(InvalidRequestError, tensor, problem)
    if region is None or byte_size is None:
        given, missing = (REGION, BYTE_SIZE) if byte_size is None else (BYTE_SIZE, REGION)
        raise _error(InvalidRequestError, tensor, f"has {given} and no {missing}: give both")
    found = regions.get(region)
    if found is None:
        problem = f"is to lie in shared memory region {shown(region)}, which is not registered"
        raise _error(UnknownRegionError, tensor, problem)
    if byte_size < 0 or offset < 0 or offset + byte_size > found.byte_size:
        raise _error(
            InvalidRequestError,
            tensor,
            f"has {byte_size} bytes at {offset} of shared memory region {shown(region)}, which has "
            f"{found.byte_size}",
        )
    return MemorySlice(found, offset, byte_size)


def _error(kind: type[EmbedServeError], tensor: InputTensor | str, problem: str) -> EmbedServeError:
    if isinstance(tensor, InputTensor):
        return kind(f"{tensor} {problem}", f"inputs.{tensor.name[:NAME_CHARACTERS_MAX]}")
    return kind(f"output {shown(tensor)} {problem}", f"outputs.{tensor[:NAME_CHARACTERS_MAX]}")


def is_placed(parameters: _Parameters) -> bool:
    """Whether a tensor of a message, with these, is to lie in shared memory."""
    return bool(parameters) and (REGION in parameters or BYTE_SIZE in parameters)


def place_in(
    parameters: _Parameters, tensor: InputTensor | str, regions: Regions | None
) -> MemorySlice:
    """As find_place, of what they say."""
    region = parameters[REGION].string_param if REGION in parameters else None
    byte_size = parameters[BYTE_SIZE].int64_param if BYTE_SIZE in parameters else None
    offset = parameters[OFFSET].int64_param if OFFSET in parameters else 0
    return find_place(tensor, region, byte_size, offset, regions)


def read_placed(placed: Sequence[PlacedTensor], limits: Limits, *, is_now: bool) -> bool:
    """Gives each tensor its data; False where that would take long and is to be done ``is_now``:
    then none has any.

    Raises:
        InvalidRequestError: a region is gone, or strings are none.
        RequestTooLargeError: they have more bytes than a body may, told before they are read.
    """
    nbytes = sum(place.nbytes for _, place in placed)
    if nbytes > limits.body_bytes_max:
        raise RequestTooLargeError(
            f"inputs has {nbytes} bytes in shared memory, {limits.said('body_bytes_max')}", "inputs"
        )
    text_bytes = sum(place.nbytes for tensor, place in placed if tensor.datatype == BYTES)
    if text_bytes > limits.request_text_bytes_max:
        raise RequestTooLargeError(
            f"inputs has {text_bytes} bytes of strings in shared memory, "
            + limits.said("request_text_bytes_max"),
            "inputs",
        )
    is_much = nbytes > NOW_BYTES_MAX or len(placed) > NOW_TENSORS_MAX
    if is_now and (is_much or text_bytes > NOW_TEXT_BYTES_MAX):
        return False
    count_max, limit = limits.request_values_max, limits.said("request_values_max")
    for run in runs(placed):
        (_, first), (_, last) = run[0], run[-1]
        data = memoryview(first.region.read(first.offset, last.offset + last.nbytes - first.offset))
        for tensor, place in run:
            start = place.offset - first.offset
            of_tensor = data[start : start + place.nbytes]
            is_text = tensor.datatype == BYTES
            tensor.data = (
                read_strings(tensor, of_tensor, count_max, limit) if is_text else of_tensor
            )
    return True


def runs(placed: Sequence[PlacedTensor]) -> Iterator[list[PlacedTensor]]:
    """Those that lie one behind the other, as most callers have them, to be read at once."""
    run: list[PlacedTensor] = []
    for one in placed:
        if run:
            before, place = run[-1][1], one[1]
            end = before.offset + before.nbytes
            if place.region is not before.region or place.offset != end:
                yield run
                run = []
        run.append(one)
    yield run
