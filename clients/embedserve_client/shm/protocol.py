"""Requests whose ids lie in shared memory, and the answers whose vectors do, whatever the protocol.

By Triton's system shared memory extension of the Open Inference Protocol: a file is registered
once; a request says where in it each tensor lies. REST's calls are made by rest_placed.py, gRPC's
by rpc_placed.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from embedserve_client.core.batch import RequestBatch
from embedserve_client.core.result import Layout, OutputDType
from embedserve_client.errors import EmbedServeClientError, InvalidRequest, ServerError
from embedserve_client.shm.regions import Region

VECTORS_ALIGNED_BYTES = 64
POOLED = "pooled"
"""The output that has the vectors of all keys, one after the other."""
OUTPUTS_MAX = 64
"""That a server writes to shared memory, of a request."""
Output: TypeAlias = tuple[str, tuple[int, int]]
"""A name and a shape."""
REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
BYTE_SIZE = "shared_memory_byte_size"
"""Parameters of a tensor."""
UNKNOWN_IDS = "unknown_ids."
"""What parameters of an answer begin with that count unknown ids."""
DATATYPES = {"float32": "FP32", "float16": "FP16"}
_DTYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP16": np.dtype("<f2")}


class SharedMemoryRejected(EmbedServeClientError):
    """What was refused with tensors in shared memory; asked without, the server says why, or
    answers."""


@dataclass(frozen=True)
class OutputLayout:
    """How a version of a model answers all its keys."""

    layout: Layout
    is_pooled: bool

    def outputs(self, batch: RequestBatch) -> list[Output]:
        """What to ask for, and what is answered; one behind the other they are all its vectors."""
        if self.is_pooled:
            return [(POOLED, (batch.batch_size, self.layout.width))]
        rows = self.lengths(batch).sum(axis=1, dtype=np.int64).tolist()
        names, widths = self.layout.keys, self.layout.length_per_key
        return list(zip(names, zip(rows, widths, strict=True), strict=True))

    def shape(self, batch: RequestBatch) -> tuple[int, int]:
        """Of all vectors."""
        shapes = [shape for _, shape in self.outputs(batch)]
        return sum(rows for rows, _ in shapes), shapes[0][1]

    def lengths(self, batch: RequestBatch) -> NDArray[np.int32]:
        """[keys, batch_size]: the ids of each key's feature, which a key is named by, with "@TABLE"
        behind it where several tables have it."""
        of_feature = batch.lengths.reshape(len(batch.keys), batch.batch_size)
        lengths = np.zeros((len(self.layout.keys), batch.batch_size), np.int32)
        for at, key in enumerate(self.layout.keys):
            feature = key if key in batch.keys else key.rpartition("@")[0]
            if feature in batch.keys:
                lengths[at] = of_feature[batch.keys.index(feature)]
        return lengths


@dataclass(frozen=True)
class Lookup:
    """A request that `may_be_placed`.

    Attributes:
        headers: that say who asks; gRPC has them as metadata.
        over_the_connection: the call that asks for the same by its message, within so many seconds.
    """

    batch: RequestBatch
    model: str | None
    output_dtype: OutputDType
    headers: Mapping[str, str]
    over_the_connection: Callable[[float | None], Any]

    @property
    def start(self) -> int:
        """Where vectors begin, behind the ids."""
        batch = self.batch
        weights_bytes = 0 if batch.weights is None else 4 * batch.weights.size
        nbytes = 8 * batch.ids.size + 4 * batch.lengths.size + weights_bytes
        return -(-nbytes // VECTORS_ALIGNED_BYTES) * VECTORS_ALIGNED_BYTES

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of vectors."""
        return _DTYPES[DATATYPES[self.output_dtype]]

    def nbytes(self, form: OutputLayout) -> int:
        """Of ids, and of vectors of a version."""
        rows, width = form.shape(self.batch)
        return self.start + rows * width * self.dtype.itemsize


@dataclass(frozen=True)
class Answer:
    """What came over the connection."""

    model: str
    version: int
    outputs: list[Output]
    dtype: np.dtype[Any]
    unknown_ids: dict[str, int]


def may_be_placed(batch: RequestBatch, output_dtype: object, output_keys: object) -> bool:
    """Whether a request may go through shared memory."""
    has_all_keys = isinstance(output_keys, list | tuple) and not output_keys
    is_named = isinstance(output_dtype, str) and output_dtype in DATATYPES
    return has_all_keys and is_named and not batch.string_keys


class TensorSlice(NamedTuple):
    """One of a request, in shared memory; an output has no datatype and no size yet."""

    name: str
    offset: int
    nbytes: int
    datatype: str = ""
    size: int = 0


class PlacedCalls(Protocol):
    """Makes the calls of a protocol, each within so many seconds.

    Attributes:
        bytes_min: of ids and vectors together; what is smaller is over the connection sooner.
    """

    bytes_min: int

    def register(self, region: Region, timeout_s: float | None) -> Any:
        """Raises InvalidRequest where the server has no shared memory, or another; NotPlaced where
        it has no room, or does not know who asks."""

    def infer(
        self,
        region: Region,
        inputs: list[TensorSlice],
        outputs: list[TensorSlice],
        lookup: Lookup,
        model: str,
        timeout_s: float | None,
    ) -> Any:
        """Answered by an Answer; model: that is asked for, by its own name if the lookup names
        none."""


def put(batch: RequestBatch, region: Region) -> list[TensorSlice]:
    """Writes all tensors, one behind the other; where each lies."""
    lengths = np.ascontiguousarray(batch.lengths, "<i4").reshape(len(batch.keys), batch.batch_size)
    ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64)).tolist()
    parts = [("ids", "INT64", np.ascontiguousarray(batch.ids, "<i8"))]
    if batch.weights is not None:
        parts.append(("weights", "FP32", np.ascontiguousarray(batch.weights, "<f4")))
    inputs: list[TensorSlice] = []
    start = offset = 0
    for key, of_key, end in zip(batch.keys, lengths, ends, strict=True):
        tensors = [(part, datatype, values[start:end]) for part, datatype, values in parts]
        # In this order the server reads them soonest.
        for part, datatype, values in (tensors[0], ("lengths", "INT32", of_key), *tensors[1:]):
            name = f"{key}.{part}"
            inputs.append(TensorSlice(name, offset, values.nbytes, datatype, values.size))
            offset = region.write(offset, values)
        start = end
    return inputs


def wanted(outputs: Iterable[Output], lookup: Lookup) -> list[TensorSlice]:
    """Where they are to lie, one behind the other."""
    tensors, offset = [], lookup.start
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
    """outputs: (name, shape, datatype, whether it lies in shared memory). ValueError or LookupError
    where that is none."""
    told = list(outputs)
    (datatype,) = {one for _, _, one, _ in told}
    if not all(is_placed for _, _, _, is_placed in told):
        raise ValueError("an output is not in shared memory")
    unknown_ids = {
        name.removeprefix(UNKNOWN_IDS): int(number)
        for name, number in parameters
        if name.startswith(UNKNOWN_IDS)
    }
    shapes: list[Any] = [(name, (*shape,)) for name, shape, _, _ in told]
    return Answer(model, int(version), shapes, _DTYPES[datatype], unknown_ids)


@contextmanager
def reading() -> Iterator[None]:
    """Has what cannot be read as an answer be a ServerError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"the server's answer is no inference: {error!r}") from error


def no_shared_memory(prefix: str) -> InvalidRequest:
    said = "the server has no shared memory: it is started with --shared-memory"
    return wrong_shared_memory(prefix, said)


def wrong_shared_memory(prefix: str, said: str) -> InvalidRequest:
    return InvalidRequest(f"shared_memory is {prefix!r}: {said}", field="shared_memory")
