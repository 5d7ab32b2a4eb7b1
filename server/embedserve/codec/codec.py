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
from embedserve.codec.open_inference import bodies, body_answers, message_answers, messages
from embedserve.config import Limits
from embedserve.errors import EmbedServeError, RequestTooLargeError
from embedserve.shared_memory.region import Regions
from embedserve.types import Encoded, LookupRequest, LookupResult, Parts

Decode = Callable[[bytes, str, Limits], LookupRequest]
DecodeNow = Callable[[bytes, str, Limits], LookupRequest | None]


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """One form of requests and answers.

    Attributes:
        content_type: as HTTP names it.
        limit: the setting that bounds a body, beside body_bytes_max.
        decode: (body, model of the URL or "", limits) to a request; raises InvalidRequestError,
            and RequestTooLargeError before it reads much.
        decode_now: the same where that is quick; None where it takes long.
        encode: a result to its bytes in pieces, none of which takes long to make.
        encode_now: the same where all of it is quick, and how many bytes; None where it takes long.
        model_of: the model that a body names, "" where it names none; decodes nothing else.
        sizes_of: (bags, ids) that a body has, about and seldom more; decodes nothing.
        encode_error: an error as REST answers it.
        encode_streamed_error: an error as a stream answers it in a request's place.
        head_bytes: of an answer in pieces those of its JSON, which a header tells; 0 where all of
            it is JSON. None of forms that have no such answers.
        in_regions: (decode_now, decode) of requests whose tensors may lie in regions of shared
            memory, these. None of forms that have none.
    """

    content_type: bytes
    limit: str
    decode: Decode
    decode_now: DecodeNow
    encode: Callable[[LookupResult], Iterable[bytes | memoryview]]
    encode_now: Callable[[LookupResult], Encoded | None]
    model_of: Callable[[bytes], str]
    sizes_of: Callable[[bytes], tuple[int, int]]
    encode_error: Callable[[EmbedServeError], bytes] = json_codec.encode_error
    encode_streamed_error: Callable[[EmbedServeError], bytes] = protobuf_answers.encode_error
    head_bytes: Callable[[Parts], int] | None = None
    in_regions: Callable[[Regions], tuple[DecodeNow, Decode]] | None = None

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
    json_codec.decode_now,
    json_codec.encode_pieces,
    json_codec.encode_now,
    lambda body: "",
    json_codec.sizes_of,
)
PROTOBUF = Codec(
    b"application/x-protobuf",
    "body_bytes_max",
    protobuf_codec.decode_request,
    protobuf_codec.decode_now,
    protobuf_answers.encode_pieces,
    protobuf_answers.encode_now,
    protobuf_codec.model_of,
    protobuf_codec.sizes_of,
)
ARROW = Codec(
    b"application/vnd.apache.arrow.stream",
    "body_bytes_max",
    arrow_requests.decode_request,
    arrow_requests.decode_now,
    arrow_answers.encode_pieces,
    arrow_answers.encode_now,
    lambda body: "",
    arrow_requests.sizes_of,
)
"""Streams of columns."""


def _bodies_in(regions: Regions, json_bytes: int | None = None) -> tuple[DecodeNow, Decode]:
    return (
        partial(bodies.decode_now, json_bytes=json_bytes, regions=regions),
        partial(bodies.decode_request, json_bytes=json_bytes, regions=regions),
    )


def _messages_in(regions: Regions) -> tuple[DecodeNow, Decode]:
    return (
        partial(messages.decode_now, regions=regions),
        partial(messages.decode_request, regions=regions),
    )


INFER = Codec(
    b"application/json",
    "request_text_bytes_max",
    bodies.decode_request,
    bodies.decode_now,
    body_answers.encode_pieces,
    body_answers.encode_now,
    lambda body: "",
    bodies.sizes_of,
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
        decode_now=partial(bodies.decode_now, json_bytes=json_bytes),
        sizes_of=partial(bodies.sizes_of, json_bytes=json_bytes),
        in_regions=partial(_bodies_in, json_bytes=json_bytes),
    )


INFER_MESSAGE = Codec(
    PROTOBUF.content_type,
    "body_bytes_max",
    messages.decode_request,
    messages.decode_now,
    message_answers.encode_pieces,
    message_answers.encode_now,
    messages.model_of,
    messages.sizes_of,
    in_regions=_messages_in,
)
"""ModelInferRequest and ModelInferResponse."""
INFER_STREAMED = replace(
    INFER_MESSAGE,
    encode=message_answers.encode_streamed_pieces,
    encode_now=message_answers.encode_streamed_now,
    encode_streamed_error=message_answers.encode_stream_error,
)
"""The same in a ModelStreamInferResponse each."""

PREDICT = Codec(
    PROTOBUF.content_type,
    "body_bytes_max",
    predictor_codec.decode_request,
    predictor_codec.decode_now,
    predictor_codec.encode_pieces,
    predictor_codec.encode_now,
    lambda body: "",
    predictor_codec.sizes_of,
)
"""TorchRec's PredictionRequest and PredictionResponse."""
