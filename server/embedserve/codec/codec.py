"""The codecs by name: each a pair of pure functions, with the content type of its bytes.

Tensors that lie in shared memory are read and written here, too, through the regions that requests
are decoded with: they are as the bytes of a body.
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
    """One form of requests and answers.

    Attributes:
        content_type: as HTTP names it.
        limit: the setting that bounds a body, beside body_bytes_max.
        decode: (body, model of the URL or "", limits) to a request; raises InvalidRequestError,
            and RequestTooLargeError before it reads much.
        try_decode_inline: the same where that is quick; None where it takes long.
        encode: a result to its bytes in pieces, none of which takes long to make.
        try_encode_inline: the same and its bytes where all of it is quick; None where it takes
            long.
        peek_model: the model that a body names, "" where it names none; decodes nothing else.
        estimate_size: (bags, ids) that a body has, about and seldom more; decodes nothing.
        encode_error: an error as REST answers it.
        encode_streamed_error: an error as a stream answers it in a request's place.
        head_bytes: of an answer in pieces those of its JSON, which a header tells; 0 where all of
            it is JSON. None of forms that have no such answers.
        in_regions: (try_decode_inline, decode) for requests whose tensors may be located in the
            given regions of shared memory; None for formats without such tensors.
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
        """Of a body."""
        bytes_max: int = min(limits.body_bytes_max, getattr(limits, self.limit))
        return bytes_max

    def check_size(self, nbytes: int, limits: Limits, *, is_whole: bool = True) -> None:
        """Raises RequestTooLargeError for a body of ``nbytes``, or more if not ``is_whole``."""
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
"""Streams of columns."""


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
"""The Open Inference Protocol's JSON; its answers may have values in binary behind it."""
BINARY = b"application/octet-stream"
"""The content type of those."""
CODECS_MAX = 512


@lru_cache(CODECS_MAX)
def infer_binary(json_bytes: int) -> Codec:
    """Of bodies that begin with so much JSON, and have tensors in binary behind it. A caller's
    requests have the same few lengths over and over."""
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
"""ModelInferRequest and ModelInferResponse."""
INFER_STREAMED = replace(
    INFER_MESSAGE,
    encode=message_answers.encode_streamed_pieces,
    try_encode_inline=message_answers.try_encode_streamed_inline,
    encode_streamed_error=message_answers.encode_stream_error,
)
"""The same in a ModelStreamInferResponse each."""

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
"""TorchRec's PredictionRequest and PredictionResponse."""
