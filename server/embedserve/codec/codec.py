"""The codecs by name: each a pair of pure functions, with the content type of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from embedserve.codec import json_codec, protobuf_codec
from embedserve.config import Limits
from embedserve.types import LookupRequest, LookupResult


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """One form of requests and answers.

    Attributes:
        content_type: as HTTP names it.
        decode: (body, model of the URL or "", limits) to a request; raises InvalidRequestError,
            and RequestTooLargeError before it reads much.
        decode_now: the same where that is quick; None where it takes long.
        encode: a result to (its bytes in pieces, how many).
        model_of: the model that a body names, "" where it names none; decodes nothing else.
    """

    content_type: bytes
    decode: Callable[[bytes, str, Limits], LookupRequest]
    decode_now: Callable[[bytes, str, Limits], LookupRequest | None]
    encode: Callable[[LookupResult], tuple[Sequence[bytes | memoryview], int]]
    model_of: Callable[[bytes], str]


def _whole(body: bytes) -> tuple[Sequence[bytes | memoryview], int]:
    return (body,), len(body)


JSON = Codec(
    b"application/json",
    json_codec.decode_request,
    json_codec.decode_now,
    lambda result: _whole(json_codec.encode_result(result)),
    lambda body: "",
)
PROTOBUF = Codec(
    b"application/x-protobuf",
    protobuf_codec.decode_request,
    protobuf_codec.decode_now,
    protobuf_codec.encode_parts,
    protobuf_codec.model_of,
)
