"""The codecs by name: each a pair of pure functions, with the content type of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from embedserve.codec import json_codec, protobuf_codec
from embedserve.config import Limits
from embedserve.errors import RequestTooLargeError
from embedserve.types import Encoded, LookupRequest, LookupResult


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
    """

    content_type: bytes
    limit: str
    decode: Callable[[bytes, str, Limits], LookupRequest]
    decode_now: Callable[[bytes, str, Limits], LookupRequest | None]
    encode: Callable[[LookupResult], Iterable[bytes | memoryview]]
    encode_now: Callable[[LookupResult], Encoded | None]
    model_of: Callable[[bytes], str]
    sizes_of: Callable[[bytes], tuple[int, int]]

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
    protobuf_codec.encode_pieces,
    protobuf_codec.encode_now,
    protobuf_codec.model_of,
    protobuf_codec.sizes_of,
)
