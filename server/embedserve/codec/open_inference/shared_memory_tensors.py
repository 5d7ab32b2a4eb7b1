"""Tensors in shared memory: finds their location from a request's parameters, and reads their
bytes.

The bytes are copied, and the rest of the codec treats and bounds them like bytes of a body.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from embedserve.codec.open_inference.strings import read_strings
from embedserve.codec.open_inference.tensors import BYTES, INLINE_TENSOR_BYTES_MAX, InputTensor
from embedserve.config import Limits
from embedserve.errors import (
    EmbedServeError,
    InvalidRequestError,
    RequestTooLargeError,
    UnknownRegionError,
    shortened,
)
from embedserve.lookup_types import WouldBlockError
from embedserve.shared_memory.region import MemorySlice, Regions
from embedserve_proto import open_inference_pb2 as pb

REGION = "shared_memory_region"
BYTE_SIZE = "shared_memory_byte_size"
OFFSET = "shared_memory_offset"
"""Names of the parameters that locate an input or an output in shared memory."""
INLINE_TEXT_BYTES_MAX = 64 << 10
"""Bytes of strings that are read on the event loop's thread."""
INLINE_TENSORS_MAX = 128
"""Tensors that are read on the event loop's thread."""
_Parameters = Mapping[str, pb.InferParameter]
LocatedTensor = tuple[InputTensor, MemorySlice]
"""An input in shared memory, which has no data yet, and its location."""


def find_location(
    tensor: InputTensor | str,
    region: str | None,
    byte_size: int | None,
    offset: int,
    regions: Regions | None,
) -> MemorySlice:
    """Returns the location of ``tensor``, which is an input or the name of an output.

    Args:
        regions: shared-memory regions of the caller; None if the server has no shared memory.

    Raises:
        InvalidRequestError: the location is incomplete or beyond the region's end, or the server
            has no shared memory.
        UnknownRegionError: the caller has no region with this name.
    """
    if regions is None:
        problem = (
            "names a region of shared memory, which this server does not use (--shared-memory)"
        )
        raise _error(InvalidRequestError, tensor, problem)
    if region is None or byte_size is None:
        given, missing = (REGION, BYTE_SIZE) if byte_size is None else (BYTE_SIZE, REGION)
        raise _error(InvalidRequestError, tensor, f"has {given} and no {missing}: give both")
    found = regions.get(region)
    if found is None:
        problem = f"names shared memory region {shortened(region)!r}, which is not registered"
        raise _error(UnknownRegionError, tensor, problem)
    if byte_size < 0 or offset < 0 or offset + byte_size > found.byte_size:
        raise _error(
            InvalidRequestError,
            tensor,
            f"has {byte_size} bytes at {offset} of shared memory region {shortened(region)!r}, "
            f"which has {found.byte_size}",
        )
    return MemorySlice(found, offset, byte_size)


def _error(kind: type[EmbedServeError], tensor: InputTensor | str, problem: str) -> EmbedServeError:
    if isinstance(tensor, InputTensor):
        return kind(f"{tensor} {problem}", f"inputs.{shortened(tensor.name)}")
    return kind(f"output {shortened(tensor)!r} {problem}", f"outputs.{shortened(tensor)}")


def is_in_shared_memory(parameters: _Parameters) -> bool:
    """Returns whether a tensor of a message with these parameters is in shared memory."""
    return bool(parameters) and (REGION in parameters or BYTE_SIZE in parameters)


def location_in(
    parameters: _Parameters, tensor: InputTensor | str, regions: Regions | None
) -> MemorySlice:
    """Returns the location of ``tensor`` in ``parameters``, with the errors of find_location."""
    region = parameters[REGION].string_param if REGION in parameters else None
    byte_size = parameters[BYTE_SIZE].int64_param if BYTE_SIZE in parameters else None
    offset = parameters[OFFSET].int64_param if OFFSET in parameters else 0
    return find_location(tensor, region, byte_size, offset, regions)


def read_shared_memory(
    located: Sequence[LocatedTensor], limits: Limits, *, is_inline: bool
) -> None:
    """Sets the data of each tensor.

    Raises:
        InvalidRequestError: a region no longer exists, or strings are malformed.
        RequestTooLargeError: the tensors have more bytes than a body may have. Raised before they
            are read.
        WouldBlockError: ``is_inline``, and reading would take long.
    """
    nbytes = sum(location.nbytes for _, location in located)
    if nbytes > limits.body_bytes_max:
        raise RequestTooLargeError(
            f"inputs has {nbytes} bytes in shared memory, {limits.describe('body_bytes_max')}",
            "inputs",
        )
    text_bytes = sum(location.nbytes for tensor, location in located if tensor.datatype == BYTES)
    if text_bytes > limits.request_text_bytes_max:
        raise RequestTooLargeError(
            f"inputs has {text_bytes} bytes of strings in shared memory, "
            + limits.describe("request_text_bytes_max"),
            "inputs",
        )
    is_much = nbytes > INLINE_TENSOR_BYTES_MAX or len(located) > INLINE_TENSORS_MAX
    if is_inline and (is_much or text_bytes > INLINE_TEXT_BYTES_MAX):
        raise WouldBlockError
    for run in runs(located):
        (_, first), (_, last) = run[0], run[-1]
        data = memoryview(first.region.read(first.offset, last.offset + last.nbytes - first.offset))
        for tensor, location in run:
            start = location.offset - first.offset
            of_tensor = data[start : start + location.nbytes]
            is_text = tensor.datatype == BYTES
            tensor.data = read_strings(tensor, of_tensor, limits) if is_text else of_tensor


def runs(located: Sequence[LocatedTensor]) -> Iterator[list[LocatedTensor]]:
    """Yields runs of contiguous tensors, which are read at once. Most callers store their tensors
    in one run."""
    run: list[LocatedTensor] = []
    for one in located:
        if run:
            before, location = run[-1][1], one[1]
            end = before.offset + before.nbytes
            if location.region is not before.region or location.offset != end:
                yield run
                run = []
        run.append(one)
    yield run
