"""Inference requests with tensors in shared memory, independent of the transport.

Follows Triton's system shared memory extension of the Open Inference Protocol. A file is registered
once; each request then names the location of every tensor in it. `rest.requests` makes the REST
calls, and `grpc.requests` makes the gRPC calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from embedserve_client.core.batch import RequestBatch
from embedserve_client.core.result import Layout, OutputDType
from embedserve_client.errors import EmbedServeClientError, InvalidRequest, ServerError
from embedserve_client.shm.regions import Region

VECTORS_ALIGNED_BYTES = 64
"""Alignment of the vectors in a region: a cache line."""
POOLED = "pooled"
"""Name of the output that holds the vectors of all keys, key after key."""
OUTPUTS_MAX = 64
"""Outputs of one request that a server writes to shared memory, at most."""
Output: TypeAlias = tuple[str, tuple[int, int]]
"""Name and shape of an output tensor."""
REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
BYTE_SIZE = "shared_memory_byte_size"
"""Names of the parameters that locate a tensor in shared memory."""
UNKNOWN_IDS = "unknown_ids."
"""Prefix of the response parameters that count unknown ids."""
MISSING_IDS = "missing_ids."
"""Prefix of the response parameters that count ids whose rows no server could look up."""
SEQ = "seq"
"""Response parameter with the seq of the rows."""
DATATYPES = {"float32": "FP32", "float16": "FP16"}
_DTYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP16": np.dtype("<f2")}


class SharedMemoryRejected(EmbedServeClientError):
    """The server rejected a request with tensors in shared memory. The same request over the
    connection gets a result, or an error with the reason."""


@dataclass(frozen=True)
class OutputLayout:
    """Layout of the response of one model version for all its keys."""

    layout: Layout
    is_pooled: bool

    def outputs(self, batch: RequestBatch) -> list[Output]:
        """Returns the outputs to request, which are also the outputs of the response. Stored one
        after another, they form all vectors of the response."""
        if self.is_pooled:
            return [(POOLED, (batch.batch_size, self.layout.width))]
        rows = self.lengths(batch).sum(axis=1, dtype=np.int64).tolist()
        names, widths = self.layout.keys, self.layout.length_per_key
        return list(zip(names, zip(rows, widths, strict=True), strict=True))

    def shape(self, batch: RequestBatch) -> tuple[int, int]:
        """Returns the shape of all vectors together."""
        shapes = [shape for _, shape in self.outputs(batch)]
        return sum(rows for rows, _ in shapes), shapes[0][1]

    def lengths(self, batch: RequestBatch) -> NDArray[np.int32]:
        """Returns int32 [keys, batch_size]: the number of ids behind each key and example.

        A key is the name of its feature. If several tables serve the feature, "@TABLE" follows the
        name.
        """
        of_feature = batch.lengths.reshape(len(batch.keys), batch.batch_size)
        lengths = np.zeros((len(self.layout.keys), batch.batch_size), np.int32)
        for at, key in enumerate(self.layout.keys):
            feature = key if key in batch.keys else key.rpartition("@")[0]
            if feature in batch.keys:
                lengths[at] = of_feature[batch.keys.index(feature)]
        return lengths


@dataclass(frozen=True)
class Lookup:
    """A lookup for which `may_use_shared_memory` returned True.

    Attributes:
        headers: headers that route the request; metadata in gRPC.
        over_the_connection: builds the call for the same lookup without shared memory, from its
            time limit in seconds.
    """

    batch: RequestBatch
    model: str | None
    output_dtype: OutputDType
    headers: Mapping[str, str]
    over_the_connection: Callable[[float | None], Any]

    @property
    def vectors_offset(self) -> int:
        """Byte offset of the vectors, which follow the ids and are aligned to 64 bytes."""
        batch = self.batch
        weights_bytes = 0 if batch.weights is None else 4 * batch.weights.size
        nbytes = 8 * batch.ids.size + 4 * batch.lengths.size + weights_bytes
        return -(-nbytes // VECTORS_ALIGNED_BYTES) * VECTORS_ALIGNED_BYTES

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the vectors."""
        return _DTYPES[DATATYPES[self.output_dtype]]

    def nbytes(self, output_layout: OutputLayout) -> int:
        """Returns the bytes of the ids and of the vectors of a version."""
        rows, width = output_layout.shape(self.batch)
        return self.vectors_offset + rows * width * self.dtype.itemsize


@dataclass(frozen=True)
class Answer:
    """Response to an inference request, without the vectors in shared memory."""

    model: str
    version: int
    outputs: list[Output]
    dtype: np.dtype[Any]
    unknown_ids: dict[str, int]
    missing_ids: dict[str, int]
    seq: int | None


def may_use_shared_memory(batch: RequestBatch, output_dtype: object, output_keys: object) -> bool:
    """Returns whether a request may use shared memory: all keys, a known dtype, and no string
    ids."""
    has_all_keys = isinstance(output_keys, list | tuple) and not output_keys
    is_named = isinstance(output_dtype, str) and output_dtype in DATATYPES
    return has_all_keys and is_named and not batch.string_keys


class TensorSlice(NamedTuple):
    """Location of one tensor in a region; an output has no datatype and no size yet."""

    name: str
    offset: int
    nbytes: int
    datatype: str = ""
    size: int = 0


class SharedMemoryCalls(ABC):
    """Builds the calls of one transport. Each call gets a time limit in seconds.

    Attributes:
        bytes_min: bytes of ids and vectors from which shared memory is used. Smaller requests are
            faster over the connection.
    """

    bytes_min: int

    @abstractmethod
    def register(self, region: Region, timeout_s: float | None) -> Any:
        """Builds the call that registers ``region`` at the server.

        It raises InvalidRequest if the server has no shared memory or another prefix. It raises
        SharedMemoryRejected if the server has no room or does not accept the caller.
        """

    @abstractmethod
    def infer(
        self,
        region: Region,
        inputs: list[TensorSlice],
        outputs: list[TensorSlice],
        lookup: Lookup,
        model: str,
        timeout_s: float | None,
    ) -> Any:
        """Builds the inference call, which returns an Answer.

        Args:
            model: requested model. If the lookup names no model, the name of the default model.
        """


def write_inputs(batch: RequestBatch, region: Region) -> list[TensorSlice]:
    """Writes the tensors of a batch to ``region``, one after another, and returns their
    locations."""
    lengths = np.ascontiguousarray(batch.lengths, "<i4").reshape(len(batch.keys), batch.batch_size)
    ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64)).tolist()
    parts = [("ids", "INT64", np.ascontiguousarray(batch.ids, "<i8"))]
    if batch.weights is not None:
        parts.append(("weights", "FP32", np.ascontiguousarray(batch.weights, "<f4")))
    inputs: list[TensorSlice] = []
    start = offset = 0
    for key, of_key, end in zip(batch.keys, lengths, ends, strict=True):
        tensors = [(part, datatype, values[start:end]) for part, datatype, values in parts]
        # The server reads the tensors fastest in this order.
        for part, datatype, values in (tensors[0], ("lengths", "INT32", of_key), *tensors[1:]):
            name = f"{key}.{part}"
            inputs.append(TensorSlice(name, offset, values.nbytes, datatype, values.size))
            offset = region.write(offset, values)
        start = end
    return inputs


def output_slices(outputs: Iterable[Output], lookup: Lookup) -> list[TensorSlice]:
    """Returns the locations of the outputs: one after another, from the start of the vectors."""
    tensors, offset = [], lookup.vectors_offset
    for name, (rows, width) in outputs:
        nbytes = rows * width * lookup.dtype.itemsize
        tensors.append(TensorSlice(name, offset, nbytes))
        offset += nbytes
    return tensors


def answer_of(
    model: str,
    version: str,
    outputs: Iterable[tuple[str, Iterable[int], str, bool]],
    parameters: Iterable[tuple[str, int]],
) -> Answer:
    """Returns the Answer of a parsed response. Raises ValueError or LookupError if it is malformed.

    Args:
        outputs: (name, shape, datatype, whether the tensor is in shared memory) of each output.
    """
    listed = list(outputs)
    (datatype,) = {one for _, _, one, _ in listed}
    if not all(is_shared for _, _, _, is_shared in listed):
        raise ValueError("an output is not in shared memory")
    numbers = dict(parameters)
    unknown_ids, missing_ids = (
        {
            name.removeprefix(prefix): int(number)
            for name, number in numbers.items()
            if name.startswith(prefix)
        }
        for prefix in (UNKNOWN_IDS, MISSING_IDS)
    )
    shapes: list[Any] = [(name, (*shape,)) for name, shape, _, _ in listed]
    seq = int(numbers[SEQ]) if SEQ in numbers else None
    return Answer(model, int(version), shapes, _DTYPES[datatype], unknown_ids, missing_ids, seq)


@contextmanager
def reading() -> Iterator[None]:
    """Raises ServerError if the block fails to parse a response."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ServerError(f"the server's answer is no inference: {error!r}") from error


def no_shared_memory(prefix: str) -> InvalidRequest:
    reason = "the server has no shared memory: it is started with --shared-memory"
    return wrong_shared_memory(prefix, reason)


def wrong_shared_memory(prefix: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"shared_memory is {prefix!r}: {reason}", field="shared_memory")
