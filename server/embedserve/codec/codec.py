"""The codecs by name. A codec is a set of functions, with the content type of its bytes.

Codecs also read tensors from shared memory and write them there, through the regions that a decoder
is bound to, and treat them like the bytes of a body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from embedserve.codec import embed_request_fields, json_codec, predictor_codec, protobuf_codec
from embedserve.codec.arrow import responses as arrow_responses
from embedserve.codec.arrow.requests import ArrowDecoder
from embedserve.codec.open_inference import (
    bodies,
    body_responses,
    infer_messages,
    message_responses,
)
from embedserve.codec.open_inference.bodies import BodyDecoder
from embedserve.codec.open_inference.infer_messages import MessageDecoder
from embedserve.codec.protobuf_codec import ProtobufDecoder
from embedserve.config import Limits
from embedserve.errors import EmbedServeError, RequestTooLargeError
from embedserve.lookup_types import EncodedResponse, LookupRequest, LookupResult, ResponseChunks
from embedserve.shared_memory.region import Regions

PROTOBUF_TYPE = b"application/x-protobuf"
BINARY_TYPE = b"application/octet-stream"
"""Content type of bodies that have binary tensors behind their JSON."""
BINARY_CODECS_MAX = 512
"""Codecs cached by the length of their JSON; the cache is cleared when it is full."""


class Decode(Protocol):
    """Decoder of a format's requests."""

    def __call__(
        self, body: bytes, model: str, limits: Limits, /, *, is_inline: bool = False
    ) -> LookupRequest:
        """Returns the request in ``body``, for ``model`` of the URL, or "".

        Raises:
            InvalidRequestError: the body is invalid.
            RequestTooLargeError: the body has more than ``limits`` allow.
            WouldBlockError: ``is_inline``, and decoding would take long.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """A format of requests and responses.

    Attributes:
        content_type: value of the Content-Type header.
        limit: name of the setting that bounds a body, in addition to body_bytes_max.
        decode: decoder of requests.
        encode: function from a result to the chunks of its response, each quick to encode.
        try_encode_inline: function from a result to (chunks, byte count) where all of it is quick;
            returns None where encoding takes long.
        estimate_size: function from a body to its approximate (bags, ids), seldom too many. Decodes
            nothing.
        peek_model: function from a body to the model that it names, "" if none. Decodes nothing
            else.
        encode_error: function from an error to the body of a REST error response.
        encode_streamed_error: function from an error to the message that a stream sends in place of
            the response.
        json_bytes: function from the chunks of a response to the bytes of its JSON, which are sent
            in a header; 0 where the whole response is JSON. None for formats without binary values
            behind JSON.
        response_headers: function from a result to headers of its response, or gRPC trailers. None
            for formats whose messages have a field for everything.
        bind_regions: function from regions of shared memory to the decoder of requests whose
            tensors may be located there. None for formats without such tensors.
    """

    content_type: bytes
    limit: str
    decode: Decode
    encode: Callable[[LookupResult], Iterable[bytes | memoryview]]
    try_encode_inline: Callable[[LookupResult], EncodedResponse | None]
    estimate_size: Callable[[bytes], tuple[int, int]]
    peek_model: Callable[[bytes], str] = lambda body: ""
    encode_error: Callable[[EmbedServeError], bytes] = json_codec.encode_error
    encode_streamed_error: Callable[[EmbedServeError], bytes] = protobuf_codec.encode_error
    json_bytes: Callable[[ResponseChunks], int] | None = None
    response_headers: Callable[[LookupResult], list[tuple[bytes, bytes]]] | None = None
    bind_regions: Callable[[Regions], Decode] | None = None

    def bytes_max(self, limits: Limits) -> int:
        """Returns the largest number of bytes that a body may have."""
        bytes_max: int = min(limits.body_bytes_max, getattr(limits, self.limit))
        return bytes_max

    def check_size(self, nbytes: int, limits: Limits, *, is_whole: bool = True) -> None:
        """Raises RequestTooLargeError if a body of ``nbytes`` is too large. A body that is not
        ``is_whole`` has at least ``nbytes``."""
        bytes_max = self.bytes_max(limits)
        if nbytes > bytes_max:
            name = "body_bytes_max" if limits.body_bytes_max == bytes_max else self.limit
            at_least = "" if is_whole else "at least "
            raise RequestTooLargeError(
                f"body has {at_least}{nbytes} bytes, {limits.describe(name)}", "body"
            )


JSON = Codec(
    content_type=b"application/json",
    limit="request_text_bytes_max",
    decode=json_codec.decode_request,
    encode=json_codec.encode_chunks,
    try_encode_inline=json_codec.try_encode_inline,
    estimate_size=json_codec.estimate_size,
)
PREDICT = Codec(
    content_type=PROTOBUF_TYPE,
    limit="body_bytes_max",
    decode=predictor_codec.decode_request,
    encode=predictor_codec.encode_chunks,
    try_encode_inline=predictor_codec.try_encode_inline,
    estimate_size=predictor_codec.estimate_size,
    response_headers=predictor_codec.response_headers,
)
"""Codec of TorchRec's PredictionRequest and PredictionResponse."""


class Codecs:
    """The codecs of a process, with their caches of templates.

    To add a format of POST /embed, put its Codec into ``formats``, and describe it in
    api/wire_openapi.py.

    Attributes:
        formats: formats of POST /embed. The first whose content type is a prefix of the request's
            Content-Type decodes the body; Accept selects the one of the response. JSON, the
            default, is the last.
        json: JSON.
        protobuf: EmbedRequest and EmbedResponse.
        arrow: Arrow streams, columns of ids in and columns of vectors out.
        infer: the Open Inference Protocol's JSON. Its responses may have binary values behind the
            JSON.
        infer_message: the protocol's ModelInferRequest and ModelInferResponse.
        infer_streamed: infer_message that wraps each response in a ModelStreamInferResponse.
        predict: TorchRec's PredictionRequest and PredictionResponse.
    """

    def __init__(self) -> None:
        self.json = JSON
        self.predict = PREDICT
        protobuf, arrow, message = ProtobufDecoder(), ArrowDecoder(), MessageDecoder()
        self.protobuf = Codec(
            content_type=PROTOBUF_TYPE,
            limit="body_bytes_max",
            decode=protobuf.decode_request,
            encode=protobuf_codec.encode_chunks,
            try_encode_inline=protobuf_codec.try_encode_inline,
            peek_model=embed_request_fields.peek_model,
            estimate_size=embed_request_fields.estimate_size,
        )
        self.arrow = Codec(
            content_type=b"application/vnd.apache.arrow.stream",
            limit="body_bytes_max",
            decode=arrow.decode_request,
            encode=arrow_responses.encode_chunks,
            try_encode_inline=arrow_responses.try_encode_inline,
            estimate_size=arrow.estimate_size,
        )
        self._bodies = BodyDecoder()
        self.infer = _infer(self._bodies)
        self.infer_message = Codec(
            content_type=PROTOBUF_TYPE,
            limit="body_bytes_max",
            decode=message.decode_request,
            encode=message_responses.encode_chunks,
            try_encode_inline=message_responses.try_encode_inline,
            peek_model=infer_messages.peek_model,
            estimate_size=infer_messages.estimate_size,
            bind_regions=lambda regions: partial(message.decode_request, regions=regions),
        )
        self.infer_streamed = replace(
            self.infer_message,
            encode=message_responses.encode_streamed_chunks,
            try_encode_inline=message_responses.try_encode_streamed_inline,
            encode_streamed_error=message_responses.encode_stream_error,
        )
        self.formats = (self.protobuf, self.arrow, self.json)
        self._binary: dict[int, Codec] = {}

    def infer_binary(self, json_bytes: int) -> Codec:
        """Returns the codec for bodies with ``json_bytes`` of JSON followed by binary tensors.

        Cached, up to BINARY_CODECS_MAX, because a caller's requests have the same few JSON lengths.
        """
        codec = self._binary.get(json_bytes)
        if codec is None:
            if len(self._binary) >= BINARY_CODECS_MAX:
                self._binary.clear()
            codec = self._binary[json_bytes] = _infer(self._bodies, json_bytes)
        return codec

    def predict_from(self, min_seq: bytes | None) -> Codec:
        """Returns the codec for a PredictionRequest with ``min_seq`` as the value of its header
        x-min-seq; None if absent."""
        if min_seq is None:
            return self.predict
        decode = partial(predictor_codec.decode_request, min_seq=min_seq)
        return replace(self.predict, decode=decode)


def _infer(decoder: BodyDecoder, json_bytes: int | None = None) -> Codec:
    """Returns the codec for bodies with ``json_bytes`` of JSON before their tensors; None for JSON
    alone."""
    decode = partial(decoder.decode_request, json_bytes=json_bytes)
    is_json = json_bytes is None
    return Codec(
        content_type=b"application/json" if is_json else BINARY_TYPE,
        limit="request_text_bytes_max" if is_json else "body_bytes_max",
        decode=decode,
        encode=body_responses.encode_chunks,
        try_encode_inline=body_responses.try_encode_inline,
        estimate_size=partial(bodies.estimate_size, json_bytes=json_bytes),
        encode_error=body_responses.encode_error,
        json_bytes=body_responses.json_bytes_of,
        bind_regions=lambda regions: partial(decode, regions=regions),
    )
