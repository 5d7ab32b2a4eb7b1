"""Codecs for tests that need no server."""

from __future__ import annotations

from embedserve.codec.codec import Codec, Codecs
from embedserve.lookup_types import LookupResult

CODECS = Codecs()
JSON, PROTOBUF, ARROW = CODECS.json, CODECS.protobuf, CODECS.arrow


def encoded(codec: Codec, result: LookupResult) -> bytes:
    """Encodes in chunks, and inline if that is quick; checks that the bytes are equal."""
    encoded_chunks = [*codec.encode(result)]
    whole = b"".join(encoded_chunks)
    inline = codec.try_encode_inline(result)
    if inline is not None:
        parts, nbytes = inline
        assert b"".join(parts) == whole
        assert nbytes == len(whole)
        if codec.head_bytes is not None:
            assert codec.head_bytes(parts) == codec.head_bytes(encoded_chunks)
    return whole
