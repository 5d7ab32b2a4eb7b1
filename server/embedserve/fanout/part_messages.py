"""Messages between a router and a shard: the request of a lookup, and the values of its response.

A request is an EmbedRequest of embedding.proto. Its arrays are sent as they are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from embedserve.codec.protobuf_fields import VARINT, field_tag, varint
from embedserve.fanout.partition import PartLookup
from embedserve_proto import embedding_pb2
from embedserve_store.format.manifest import Manifest


def _tag(field: str) -> bytes:
    return varint(field_tag(embedding_pb2.EmbedRequest, field))


IDS, LENGTHS, WEIGHTS = _tag("ids_bytes"), _tag("lengths_bytes"), _tag("weights_bytes")
OUTPUT_DTYPE = varint(field_tag(embedding_pb2.EmbedRequest, "output_dtype", VARINT))
EXAMPLES = varint(field_tag(embedding_pb2.EmbedResponse, "batch_size", VARINT))
VALUES_DTYPE = varint(field_tag(embedding_pb2.EmbedResponse, "output_dtype", VARINT))
VALUES = varint(field_tag(embedding_pb2.EmbedResponse, "values"))


VALUE_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("float32", "float16")}
"""Dtypes in which shards may send their values."""


class MismatchedResponseError(Exception):
    """A shard's response does not match the request."""


class PartMessages:
    """Requests to one part of one version, and its responses."""

    def __init__(
        self, part: Manifest, features: Sequence[str], dtype: str, *, has_more: bool = False
    ) -> None:
        """
        Args:
            part: manifest of the part.
            features: its features in the order in which their ids are sent.
            dtype: dtype of the values in responses, one of VALUE_DTYPES.
            has_more: whether shards of the part have more tables, which are not requested.
        """
        self._dtype = VALUE_DTYPES[dtype]
        self._output_dtype = embedding_pb2.OutputDType.Value(dtype.upper())
        dtype_value = varint(self._output_dtype)
        self._end = OUTPUT_DTYPE + dtype_value if self._output_dtype else b""
        self._values = (VALUES_DTYPE + dtype_value if self._output_dtype else b"") + VALUES
        model, version = part.model, part.version
        self._start = embedding_pb2.EmbedRequest(
            model=f"{model}@{version}", keys=features
        ).SerializeToString()
        if has_more:
            selected = embedding_pb2.EmbedRequest(output_keys=part.keys)
            self._end += selected.SerializeToString()
        self._model = model
        self._version = version
        # Responses begin with these fields, and end with the number of examples and the values.
        start = embedding_pb2.EmbedResponse(
            model=model, version=version, keys=part.keys, length_per_key=part.length_per_key
        )
        self._response_start = start.SerializeToString() + EXAMPLES

    def encode(self, lookup: PartLookup) -> list[bytes]:
        """Returns the request of ``lookup`` in chunks. The arrays are copied once: they are small,
        and a call may be repeated."""
        chunks = [
            self._start + IDS + varint(lookup.ids.nbytes),
            lookup.ids.tobytes(),
            LENGTHS + varint(lookup.lengths.nbytes),
            lookup.lengths.tobytes(),
        ]
        if lookup.weights is not None:
            chunks += [WEIGHTS + varint(lookup.weights.nbytes), lookup.weights.tobytes()]
        if self._end:
            chunks.append(self._end)
        return chunks

    def decode(self, body: bytes, shape: tuple[int, int]) -> np.ndarray:
        """Returns the values, of ``shape`` and in the requested dtype, of the response ``body``.

        Raises:
            MismatchedResponseError: the response has another version, shape or dtype.
        """
        nbytes = self._dtype.itemsize * shape[0] * shape[1]
        start = self._response_start + varint(shape[0]) + self._values + varint(nbytes)
        if len(body) == len(start) + nbytes and body.startswith(start):
            return np.ndarray(shape, self._dtype, body, len(start))
        try:
            response = embedding_pb2.EmbedResponse.FromString(body)
        except Exception as error:
            raise MismatchedResponseError(f"is not an EmbedResponse: {error}") from error
        if (response.model, response.version) != (self._model, self._version):
            raise MismatchedResponseError(
                f"is of {response.model!r} version {response.version}, "
                f"expected {self._model!r} version {self._version}"
            )
        if response.output_dtype != self._output_dtype or len(response.values) != nbytes:
            raise MismatchedResponseError(
                f"has {len(response.values)} bytes of values, "
                f"expected {nbytes} of {self._dtype.name}"
            )
        return np.frombuffer(response.values, self._dtype).reshape(shape)
