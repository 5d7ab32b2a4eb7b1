"""The codecs by name. Each codec is a set of pure functions with the content type of its bytes.

Tensors in shared memory are read and written here, too, through the regions that a decoder is bound
to. They are treated like the bytes of a body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from embedserve.codec import json_codec, predictor_codec, protobuf_answers, protobuf_codec
from embedserve.codec.arrow import answers as arrow_answers
from embedserve.codec.arrow import requests as arrow_requests
from embedserve.codec.open_inference import bodies, body_answers, infer_messages, message_answers
from embedserve.config import Limits
from embedserve.errors import EmbedServeError, RequestTooLargeError
from embedserve.lookup import EncodedResponse, LookupRequest, LookupResult, ResponseChunks
from embedserve.shared_memory.region import Regions

Decode = Callable[[bytes, str, Limits], LookupRequest]
TryDecodeInline = Callable[[bytes, str, Limits], LookupRequest | None]


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """A format of requests and responses.

    Attributes:
        content_type: value of the Content-Type header.
        limit: name of the setting that bounds a body, in addition to body_bytes_max.
        decode: function from (body, model of the URL or "", limits) to a request. Raises
            InvalidRequestError, and RequestTooLargeError before it reads much.
        try_decode_inline: the same function where decoding is quick; returns None where it takes
            long.
        encode: function from a result to the chunks of its response, each quick to encode.
        try_encode_inline: function from a result to (chunks, byte count) where all of it is quick;
            returns None where encoding takes long.
        peek_model: function from a body to the model that it names, "" if none. Decodes nothing
            else.
        estimate_size: function from a body to its approximate (bags, ids), seldom too many. Decodes
            nothing.
        encode_error: function from an error to the body of a REST error response.
        encode_streamed_error: function from an error to the message that a stream sends in place of
            the response.
        head_bytes: function from the chunks of a response to the bytes of its JSON, which are sent
            in a header; 0 where the whole response is JSON. None for formats without binary values
            behind JSON.
        in_regions: function from regions of shared memory to (try_decode_inline, decode) for
            requests whose tensors may be located there. None for formats without such tensors.
    """

    content_type: bytes
    limit: str
    decode: Decode
    try_decode_inline: TryDecodeInline
    encode: Callable[[LookupResult], Iterable[bytes | memoryview]]
    try_encode_inline: Callable[[LookupResult], EncodedResponse | None]
    peek_model: Callable[[bytes], str]
    estimate_size: Callable[[bytes], tuple[int, int]]
    encode_error: Callable[[EmbedServeError], bytes] = json_codec.encode_error
    encode_streamed_error: Callable[[EmbedServeError], bytes] = protobuf_answers.encode_error
    head_bytes: Callable[[ResponseChunks], int] | None = None
    in_regions: Callable[[Regions], tuple[TryDecodeInline, Decode]] | None = None

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
                f"body has {at_least}{nbytes} bytes, {limits.said(name)}", "body"
            )


JSON = Codec(
    b"application/json",
    "request_text_bytes_max",
    json_codec.decode_request,
    json_codec.try_decode_inline,
    json_codec.encode_pieces,
    json_codec.try_encode_inline,
    lambda body: "",
    json_codec.estimate_size,
)
PROTOBUF = Codec(
    b"application/x-protobuf",
    "body_bytes_max",
    protobuf_codec.decode_request,
    protobuf_codec.try_decode_inline,
    protobuf_answers.encode_pieces,
    protobuf_answers.try_encode_inline,
    protobuf_codec.peek_model,
    protobuf_codec.estimate_size,
)
ARROW = Codec(
    b"application/vnd.apache.arrow.stream",
    "body_bytes_max",
    arrow_requests.decode_request,
    arrow_requests.try_decode_inline,
    arrow_answers.encode_pieces,
    arrow_answers.try_encode_inline,
    lambda body: "",
    arrow_requests.estimate_size,
)
"""Codec of Arrow streams: columns of ids in, columns of vectors out."""


def _bodies_in(regions: Regions, json_bytes: int | None = None) -> tuple[TryDecodeInline, Decode]:
    return (
        partial(bodies.try_decode_inline, json_bytes=json_bytes, regions=regions),
        partial(bodies.decode_request, json_bytes=json_bytes, regions=regions),
    )


def _messages_in(regions: Regions) -> tuple[TryDecodeInline, Decode]:
    return (
        partial(infer_messages.try_decode_inline, regions=regions),
        partial(infer_messages.decode_request, regions=regions),
    )


INFER = Codec(
    b"application/json",
    "request_text_bytes_max",
    bodies.decode_request,
    bodies.try_decode_inline,
    body_answers.encode_pieces,
    body_answers.try_encode_inline,
    lambda body: "",
    bodies.estimate_size,
    encode_error=body_answers.encode_error,
    head_bytes=body_answers.head_bytes,
    in_regions=_bodies_in,
)
"""Codec of the Open Inference Protocol's JSON. Its responses may have binary values behind the
JSON."""
BINARY = b"application/octet-stream"
"""Content type of bodies that have binary tensors behind their JSON."""
CODECS_MAX = 512


@lru_cache(CODECS_MAX)
def infer_binary(json_bytes: int) -> Codec:
    """Returns the codec for bodies with ``json_bytes`` of JSON followed by binary tensors.

    Cached, up to CODECS_MAX, because a caller's requests have the same few JSON lengths.
    """
    return replace(
        INFER,
        content_type=BINARY,
        limit="body_bytes_max",
        decode=partial(bodies.decode_request, json_bytes=json_bytes),
        try_decode_inline=partial(bodies.try_decode_inline, json_bytes=json_bytes),
        estimate_size=partial(bodies.estimate_size, json_bytes=json_bytes),
        in_regions=partial(_bodies_in, json_bytes=json_bytes),
    )


INFER_MESSAGE = Codec(
    PROTOBUF.content_type,
    "body_bytes_max",
    infer_messages.decode_request,
    infer_messages.try_decode_inline,
    message_answers.encode_pieces,
    message_answers.try_encode_inline,
    infer_messages.peek_model,
    infer_messages.estimate_size,
    in_regions=_messages_in,
)
"""Codec of the Open Inference Protocol's ModelInferRequest and ModelInferResponse."""
INFER_STREAMED = replace(
    INFER_MESSAGE,
    encode=message_answers.encode_streamed_pieces,
    try_encode_inline=message_answers.try_encode_streamed_inline,
    encode_streamed_error=message_answers.encode_stream_error,
)
"""Variant of INFER_MESSAGE that wraps each response in a ModelStreamInferResponse."""

PREDICT = Codec(
    PROTOBUF.content_type,
    "body_bytes_max",
    predictor_codec.decode_request,
    predictor_codec.try_decode_inline,
    predictor_codec.encode_pieces,
    predictor_codec.try_encode_inline,
    lambda body: "",
    predictor_codec.estimate_size,
)
"""Codec of TorchRec's PredictionRequest and PredictionResponse."""
