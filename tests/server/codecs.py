"""Codecs for tests that need no server."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from embedserve.codec.codec import Codec, Codecs
from embedserve.lookup_types import LookupRequest, LookupResult

CODECS = Codecs()
JSON, PROTOBUF, ARROW = CODECS.json, CODECS.protobuf, CODECS.arrow


def decoding_in_thread(codec: Codec, decode: Callable[..., LookupRequest]) -> Codec:
    """Returns ``codec``, which decodes by ``decode`` where it does so off the event loop."""

    def decode_anywhere(*args: Any, is_inline: bool = False) -> LookupRequest:
        return codec.decode(*args, is_inline=True) if is_inline else decode(*args)

    return replace(codec, decode=decode_anywhere)


def encoded(codec: Codec, result: LookupResult) -> bytes:
    """Encodes in chunks, and inline if that is quick; checks that the bytes are equal."""
    encoded_chunks = [*codec.encode(result)]
    whole = b"".join(encoded_chunks)
    inline = codec.try_encode_inline(result)
    if inline is not None:
        parts, nbytes = inline
        assert b"".join(parts) == whole
        assert nbytes == len(whole)
        if codec.json_bytes is not None:
            assert codec.json_bytes(parts) == codec.json_bytes(encoded_chunks)
    return whole
