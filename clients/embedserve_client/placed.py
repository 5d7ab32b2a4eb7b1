"""Requests whose ids lie in shared memory, and the answers whose vectors do, as calls.

By Triton's system shared memory extension of the Open Inference Protocol: a file is registered
once; a request says where in it each tensor lies.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import quote

import httpx
import numpy as np
from numpy.typing import NDArray

from embedserve_client.batch import Batch
from embedserve_client.calls import Call, error_of
from embedserve_client.errors import EmbedServeClientError, InvalidRequest, ServerError
from embedserve_client.regions import Region
from embedserve_client.result import EmbedResult, Layout, OutputDType

VECTORS_ALIGNED_BYTES = 64
POOLED = "pooled"
"""The output that has the vectors of all keys, one after the other."""
OUTPUTS_MAX = 64
"""That a server writes to shared memory, of a request."""
Output: TypeAlias = tuple[str, tuple[int, int]]
"""A name and a shape."""
_DATATYPES = {"float32": "FP32", "float16": "FP16"}
_DTYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP16": np.dtype("<f2")}


class NotPlaced(EmbedServeClientError):
    """What was refused with tensors in shared memory; asked without, the server says why, or
    answers."""


@dataclass(frozen=True)
class Form:
    """How a version of a model answers all its keys."""

    layout: Layout
    is_pooled: bool

    def outputs(self, batch: Batch) -> list[Output]:
        """What to ask for, and what is answered; one behind the other they are all its vectors."""
        if self.is_pooled:
            return [(POOLED, (batch.batch_size, self.layout.width))]
        rows = self.lengths(batch).sum(axis=1, dtype=np.int64).tolist()
        names, widths = self.layout.keys, self.layout.length_per_key
        return list(zip(names, zip(rows, widths, strict=True), strict=True))

    def shape(self, batch: Batch) -> tuple[int, int]:
        """Of all vectors."""
        shapes = [shape for _, shape in self.outputs(batch)]
        return sum(rows for rows, _ in shapes), shapes[0][1]

    def lengths(self, batch: Batch) -> NDArray[np.int32]:
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
        over_the_connection: the call that asks /embed for the same, within so many seconds.
    """

    batch: Batch
    model: str | None
    output_dtype: OutputDType
    headers: Mapping[str, str]
    over_the_connection: Callable[[float | None], Call[EmbedResult]]

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
        return _DTYPES[_DATATYPES[self.output_dtype]]

    def nbytes(self, form: Form) -> int:
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


def may_be_placed(batch: Batch, output_dtype: object, output_keys: object) -> bool:
    """Whether a request may go through shared memory."""
    has_all_keys = isinstance(output_keys, list | tuple) and not output_keys
    is_named = isinstance(output_dtype, str) and output_dtype in _DATATYPES
    return has_all_keys and is_named and not batch.string_keys


def put(batch: Batch, region: Region) -> list[dict[str, Any]]:
    """Writes all tensors, one behind the other; the inputs that say where each lies."""
    lengths = np.ascontiguousarray(batch.lengths, "<i4").reshape(len(batch.keys), batch.batch_size)
    ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64)).tolist()
    parts = [("ids", "INT64", np.ascontiguousarray(batch.ids, "<i8"))]
    if batch.weights is not None:
        parts.append(("weights", "FP32", np.ascontiguousarray(batch.weights, "<f4")))
    inputs: list[dict[str, Any]] = []
    start = offset = 0
    for key, of_key, end in zip(batch.keys, lengths, ends, strict=True):
        tensors = [(part, datatype, values[start:end]) for part, datatype, values in parts]
        # In this order the server reads them soonest.
        for part, datatype, values in (tensors[0], ("lengths", "INT32", of_key), *tensors[1:]):
            inputs.append(
                {
                    "name": f"{key}.{part}",
                    "datatype": datatype,
                    "shape": [values.size],
                    "parameters": _placed(region, offset, values.nbytes),
                }
            )
            offset = region.write(offset, values)
        start = end
    return inputs


def _placed(region: Region, offset: int, nbytes: int) -> dict[str, Any]:
    return {
        "shared_memory_region": region.name,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": nbytes,
    }


def register_call(region: Region, prefix: str, timeout_s: float | None) -> Call[None]:
    told = {"key": region.key, "offset": 0, "byte_size": region.nbytes}
    return Call(
        method="POST",
        path=f"/v2/systemsharedmemory/region/{quote(region.name, safe='')}/register",
        read=lambda body: None,
        timeout_s=timeout_s,
        content=json.dumps(told).encode(),
        headers={"Content-Type": "application/json"},
        read_error=partial(_register_error, prefix),
    )


def _register_error(prefix: str, response: httpx.Response) -> EmbedServeClientError:
    """Of a server that has no shared memory, or another; where it has no room, or does not know who
    asks, it is asked without."""
    if response.status_code in (400, 404):
        said = "the server has no shared memory: it is started with --shared-memory"
        if response.status_code == 400:
            said = _message(response)
        return InvalidRequest(f"shared_memory is {prefix!r}: {said}", field="shared_memory")
    return _error(response)


def infer_call(
    region: Region,
    inputs: list[dict[str, Any]],
    outputs: list[Output],
    lookup: Lookup,
    model: str,
    timeout_s: float | None,
) -> Call[Answer]:
    """model: its own name, for a lookup that names none."""
    told, offset = [], lookup.start
    for name, (rows, width) in outputs:
        nbytes = rows * width * lookup.dtype.itemsize
        told.append({"name": name, "parameters": _placed(region, offset, nbytes)})
        offset += nbytes
    body = {
        "inputs": inputs,
        "outputs": told,
        "parameters": {"output_dtype": _DATATYPES[lookup.output_dtype]},
    }
    name = model if lookup.model is None else lookup.model
    return Call(
        method="POST",
        path=f"/v2/models/{quote(name, safe='@')}/infer",
        read=_read_answer,
        timeout_s=timeout_s,
        content=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **lookup.headers},
        read_error=_error,
    )


def _read_answer(body: bytes) -> Answer:
    """ServerError where it is none."""
    try:
        told = json.loads(body)
        outputs = [(one["name"], (*one["shape"],)) for one in told["outputs"]]
        (datatype,) = {one["datatype"] for one in told["outputs"]}
        if any("shared_memory_region" not in one["parameters"] for one in told["outputs"]):
            raise ValueError("an output is not in shared memory")
        unknown_ids = {
            name.removeprefix("unknown_ids."): int(number)
            for name, number in told.get("parameters", {}).items()
            if name.startswith("unknown_ids.")
        }
        version = int(told["model_version"])
        return Answer(told["model_name"], version, outputs, _DTYPES[datatype], unknown_ids)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"the server's answer is no inference: {error!r}") from error


def _error(response: httpx.Response) -> EmbedServeClientError:
    """Of a request with tensors in shared memory; what is busy or failed is so without, too."""
    status = response.status_code
    if 400 <= status < 500 and status != httpx.codes.TOO_MANY_REQUESTS:
        return NotPlaced(_message(response))
    return error_of(response)


def _message(response: httpx.Response) -> str:
    """In the protocol's own form of errors."""
    try:
        return str(json.loads(response.content)["error"])
    except (ValueError, LookupError, TypeError):
        return f"status {response.status_code}: {response.text[:200]}"
