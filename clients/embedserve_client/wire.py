"""Between our arrays and the messages of the wire contract; the same for REST and gRPC.

`request_of` fills an EmbedRequest with little-endian bytes; an `AnswerReader` turns an
EmbedResponse into an EmbedResult, or into the error that it carries. Pure but for the
reader's memory of layouts; no I/O.
"""

import numpy as np
from google.protobuf.message import DecodeError

from embedserve_client.batch import Batch
from embedserve_client.errors import EmbedServeClientError, ServerError, error_from
from embedserve_client.result import EmbedResult, Layout
from embedserve_proto import embedding_pb2 as pb

_LITTLE_FLOAT32 = np.dtype("<f4")


def request_of(batch: Batch, model: str | None) -> pb.EmbedRequest:
    """The message of a batch; model None is the server's default model."""
    message = pb.EmbedRequest(
        model=model or "",
        keys=batch.keys,
        ids_bytes=batch.ids.astype("<i8", copy=False).tobytes(),
        lengths_bytes=batch.lengths.astype("<i4", copy=False).tobytes(),
    )
    if batch.weights is not None:
        message.weights_bytes = batch.weights.astype(_LITTLE_FLOAT32, copy=False).tobytes()
    return message


class AnswerReader:
    """Reads answers and keeps one layout per model: keys change with a version, not a call."""

    def __init__(self) -> None:
        self._layouts: dict[str, Layout] = {}

    def read_bytes(self, body: bytes, batch_size: int) -> EmbedResult:
        """The result in a serialized EmbedResponse; ServerError if it is none."""
        try:
            return self.read(pb.EmbedResponse.FromString(body), batch_size)
        except DecodeError as error:
            raise ServerError(f"the server's answer is no EmbedResponse: {error}") from error

    def read(self, message: pb.EmbedResponse, batch_size: int) -> EmbedResult:
        """The result in an answer to a request of batch_size examples; values are not copied."""
        layout = self._layout_of(message)
        values = message.values
        expected_bytes = batch_size * layout.width * _LITTLE_FLOAT32.itemsize
        if message.batch_size != batch_size or len(values) != expected_bytes:
            raise ServerError(
                f"the server answered {message.batch_size} examples in {len(values)} bytes, "
                f"not {batch_size} in {expected_bytes}"
            )
        array = np.frombuffer(values, dtype=_LITTLE_FLOAT32).reshape(batch_size, layout.width)
        return EmbedResult(array, layout, message.model, message.version)

    def outcome(
        self, message: pb.EmbedResponse, batch_size: int
    ) -> EmbedResult | EmbedServeClientError:
        """The result, or the error that a stream sent in its place."""
        if message.HasField("error"):
            error = message.error
            return error_from(error.code, error.message, field=error.field)
        return self.read(message, batch_size)

    def _layout_of(self, message: pb.EmbedResponse) -> Layout:
        keys, length_per_key = tuple(message.keys), tuple(message.length_per_key)
        layout = self._layouts.get(message.model)
        if layout and layout.keys == keys and layout.length_per_key == length_per_key:
            return layout
        if not keys or len(keys) != len(length_per_key):
            raise ServerError(
                f"the server answered {len(keys)} keys with {len(length_per_key)} lengths"
            )
        layout = self._layouts[message.model] = Layout(keys, length_per_key)
        return layout
