"""Converts between numpy arrays and the messages of the wire contract; the same for REST and gRPC.

`request_of` fills an EmbedRequest with little-endian bytes. An `AnswerReader` turns an
EmbedResponse into an EmbedResult, or into the error that it carries. Nothing here does I/O. The
only state is the reader's cache of layouts.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from embedserve_client.core.batch import RequestBatch
from embedserve_client.core.result import EmbedResult, Layout, OutputDType
from embedserve_client.core.short_repr import short
from embedserve_client.errors import EmbedServeClientError, InvalidRequest, ServerError, error_from
from embedserve_proto import embedding_pb2 as pb

_LITTLE_FLOAT32 = np.dtype("<f4")
_NUMBER_OF_DTYPE = {"float32": pb.FLOAT32, "float16": pb.FLOAT16}
_DTYPE_OF_NUMBER: dict[int, np.dtype[Any]] = {
    pb.FLOAT32: _LITTLE_FLOAT32,
    pb.FLOAT16: np.dtype("<f2"),
}
SEQ_MAX = 2**63 - 1


def request_of(
    batch: RequestBatch,
    model: str | None,
    output_dtype: OutputDType = "float32",
    output_keys: Sequence[str] = (),
    min_seq: int | None = None,
) -> pb.EmbedRequest:
    """Returns the message of a batch. A model of None selects the server's default model.

    Raises InvalidRequest unless model is a string or None, output_dtype is "float32" or "float16",
    output_keys is a list of strings and min_seq an integer from 0 to SEQ_MAX, or None; also for
    half of a surrogate pair in a name.
    """
    if not isinstance(model, str | None):
        raise InvalidRequest(f"model: {short(model)} is no string", field="model")
    try:
        message = pb.EmbedRequest(
            model=model or "",
            keys=batch.keys,
            ids_bytes=batch.ids.astype("<i8", copy=False).tobytes(),
            lengths_bytes=batch.lengths.astype("<i4", copy=False).tobytes(),
            string_keys=batch.string_keys,
            string_ids=batch.string_ids,
            output_dtype=_number_of(output_dtype),
            output_keys=_checked_keys(output_keys),
        )
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{short(error.object)} is no text: half of a surrogate pair"
        ) from None
    if batch.weights is not None:
        message.weights_bytes = batch.weights.astype(_LITTLE_FLOAT32, copy=False).tobytes()
    if min_seq is not None:
        message.min_seq = _checked_seq(min_seq)
    return message


def _checked_seq(min_seq: object) -> int:
    is_int = isinstance(min_seq, int) and not isinstance(min_seq, bool)
    if not is_int or not 0 <= min_seq <= SEQ_MAX:  # type: ignore[operator]
        raise InvalidRequest(
            f"min_seq: {short(min_seq)} is no integer from 0 to {SEQ_MAX}", field="min_seq"
        )
    return cast(int, min_seq)


def _number_of(output_dtype: object) -> pb.OutputDType:
    if not isinstance(output_dtype, str) or output_dtype not in _NUMBER_OF_DTYPE:
        raise InvalidRequest(
            f"output_dtype: {short(output_dtype)} is not {' or '.join(_NUMBER_OF_DTYPE)}",
            field="output_dtype",
        )
    return _NUMBER_OF_DTYPE[output_dtype]


def _checked_keys(output_keys: object) -> Sequence[str]:
    is_list = isinstance(output_keys, Sequence) and not isinstance(output_keys, str)
    if not is_list or not all(isinstance(key, str) for key in output_keys):  # type: ignore[attr-defined]
        raise InvalidRequest(
            f"output_keys: {short(output_keys)} is no list of keys", field="output_keys"
        )
    return cast(Sequence[str], output_keys)


class AnswerReader:
    """Reads responses. Caches one layout per model, because keys change with a version, not with a
    call."""

    def __init__(self) -> None:
        self._layouts: dict[str, Layout] = {}

    def read_bytes(self, body: bytes, batch_size: int) -> EmbedResult:
        """Returns the result in a serialized EmbedResponse; raises ServerError if it is
        malformed."""
        try:
            return self.read(pb.EmbedResponse.FromString(body), batch_size)
        except DecodeError as error:
            raise ServerError(f"the server's answer is no EmbedResponse: {error}") from error

    def read(self, message: pb.EmbedResponse, batch_size: int) -> EmbedResult:
        """Returns the result in the response to a request of batch_size examples, without copying
        values."""
        layout = self._layout_of(message)
        lengths = _lengths_of(message, layout) if message.lengths else None
        rows, width = batch_size, layout.width
        if lengths is not None:
            rows, width = int(lengths.sum(dtype=np.int64)), layout.length_per_key[0]
        dtype = _dtype_of(message)
        expected_bytes = rows * width * dtype.itemsize
        if message.batch_size != batch_size or len(message.values) != expected_bytes:
            raise ServerError(
                f"the server answered {message.batch_size} examples in {len(message.values)} "
                f"bytes, not {batch_size} in {expected_bytes}"
            )
        values = np.frombuffer(message.values, dtype=dtype).reshape(rows, width)
        return EmbedResult(
            values,
            layout,
            message.model,
            message.version,
            dict(message.unknown_ids),
            lengths,
            message.seq if message.HasField("seq") else None,
            dict(message.missing_ids),
        )

    def outcome(
        self, message: pb.EmbedResponse, batch_size: int
    ) -> EmbedResult | EmbedServeClientError:
        """Returns the result, or the error that the server sent in its place in a stream."""
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
        if len(set(keys)) < len(keys) or min(length_per_key) < 0:
            raise ServerError(
                f"the server answered keys {short(keys)} of lengths {short(length_per_key)}"
            )
        layout = self._layouts[message.model] = Layout(keys, length_per_key)
        return layout


def _dtype_of(message: pb.EmbedResponse) -> np.dtype[Any]:
    """Returns the dtype that the response declares. Servers older than the field send float32."""
    dtype = _DTYPE_OF_NUMBER.get(message.output_dtype)
    if dtype is None:
        raise ServerError(
            f"the server answered values of output_dtype {message.output_dtype}, which is not "
            f"{' or '.join(_NUMBER_OF_DTYPE)}"
        )
    return dtype


def _lengths_of(message: pb.EmbedResponse, layout: Layout) -> NDArray[np.int32]:
    """Returns int32 [keys, batch_size] of a model that is not pooled; raises ServerError if
    malformed."""
    lengths = np.array(message.lengths[:], np.int32)
    keys, examples = len(layout.keys), message.batch_size
    if lengths.size != keys * examples or lengths.min() < 0:
        raise ServerError(
            f"the server answered {keys} keys of {examples} examples with {lengths.size} lengths"
        )
    if len(set(layout.length_per_key)) > 1:
        raise ServerError(f"the server answered rows of {layout.length_per_key} numbers in one")
    return lengths.reshape(keys, examples)
