"""Header blocks of calls, encoded in advance for each method and timeout."""

from __future__ import annotations

from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http_stream import Headers

MICROSECONDS_MAX = 99_999_999
"""Longest timeout in the header: grpc-timeout has at most 8 digits."""
TIMEOUT_BITS = 4
"""Significant bits of a timeout in the header. Shards cache the decoded headers of 64 blocks, so
the timeouts sent are few, under 256; each is rounded up by at most an eighth."""


class CallHeaders:
    """Header blocks of the calls of one method at one shard."""

    def __init__(
        self, authority: str, path: str, *, scheme: str = "http", metadata: Headers | None = None
    ) -> None:
        """
        Args:
            authority: host and port of the shard.
            path: service and method, such as "/package.Service/Method".
            scheme: "http", or "https" over TLS.
            metadata: further headers of every call, such as authorization; names in lower case.
        """
        self._start = encode(
            [
                (b":method", b"POST"),
                (b":scheme", scheme.encode()),
                (b":path", path.encode()),
                (b":authority", authority.encode()),
                (b"content-type", b"application/grpc"),
                (b"te", b"trailers"),
                *(metadata or []),
            ]
        )
        self._blocks: dict[int, bytes] = {}
        self._last_s, self._last = -1.0, b""  # most calls have the timeout of the one before

    def block(self, timeout_s: float) -> bytes:
        """Returns the header block of a call with ``timeout_s`` seconds, rounded up."""
        if timeout_s == self._last_s:
            return self._last
        microseconds = min(max(1, int(timeout_s * 1e6)), MICROSECONDS_MAX)
        shift = max(0, microseconds.bit_length() - TIMEOUT_BITS)
        rounded = -(-microseconds >> shift) << shift
        self._last_s = timeout_s
        self._last = self._blocks.get(rounded) or self._encode(rounded)
        return self._last

    def _encode(self, microseconds: int) -> bytes:
        value = b"%du" % min(microseconds, MICROSECONDS_MAX)
        block = self._blocks[microseconds] = self._start + encode([(b"grpc-timeout", value)])
        return block
