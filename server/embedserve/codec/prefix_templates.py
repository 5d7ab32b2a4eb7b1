"""Template cache for EmbedRequest: callers repeat the same model and keys.

The serialized prefix, up to the tag of ids_bytes, is matched byte for byte. Behind it are only the
bytes of two arrays, which are located without parsing the message.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embedserve.codec.protobuf_fields import LENGTH_DELIMITED, read_varint, tag_of
from embedserve.codec.template_cache import TemplateCache
from embedserve.lookup_types import LookupRequest
from embedserve_proto import embedding_pb2

INT64, INT32 = np.dtype("<i8"), np.dtype("<i4")
_frombuffer = np.frombuffer
IDS_TAG, LENGTHS_TAG = (
    tag_of(embedding_pb2.EmbedRequest.DESCRIPTOR.fields_by_name[name].number, LENGTH_DELIMITED)
    for name in ("ids_bytes", "lengths_bytes")
)
PREFIX_BYTES_MAX = 4096


class PrefixTemplate(NamedTuple):
    """Serialized prefix of a message, and the values that it encodes.

    Attributes:
        prefix: bytes up to and including the tag of ids_bytes.
        model: model of the message.
        features: keys of the message.
    """

    prefix: bytes
    model: str
    features: tuple[str, ...]


class PrefixTemplateCache(TemplateCache[PrefixTemplate]):
    """Cache of the prefixes of recent messages."""

    def remember(self, body: bytes, model: str, features: tuple[str, ...]) -> None:
        """Caches the prefix of ``body`` if it is serialized as usual, with ids_bytes right behind
        its keys.

        A prefix that is already cached is not added again: a message with more fields than a plain
        message begins with the same bytes.
        """
        if any(body.startswith(one.prefix) for one in self.templates):
            return
        message = embedding_pb2.EmbedRequest(model=model, keys=features)
        prefix = message.SerializeToString() + bytes([IDS_TAG])
        if len(prefix) <= PREFIX_BYTES_MAX and body.startswith(prefix):
            self.add(PrefixTemplate(prefix, model, features), len(prefix))

    def read(self, body: bytes, model: str) -> LookupRequest | None:
        """Returns the request in a message that consists of a cached prefix, ids_bytes and
        lengths_bytes, as serializers write them. Returns None for any other message, and for an
        invalid one."""
        for prefix, named, features in self.templates:
            if not body.startswith(prefix):
                continue
            try:
                size, start = read_varint(body, len(prefix))
                middle = start + size
                if body[middle] != LENGTHS_TAG:
                    return None
                size, end = read_varint(body, middle + 1)
                if end + size != len(body):
                    return None
                ids = _frombuffer(body[start:middle], INT64)
                lengths = _frombuffer(body[end:], INT32)
            except (IndexError, ValueError):
                return None
            batch_size, rest = divmod(lengths.size, len(features))
            if rest or not batch_size:
                return None
            return LookupRequest(model or named, features, ids, lengths, None, batch_size)
        return None
