"""Date header of responses over HTTP/1 and HTTP/2 (RFC 9110, section 6.6.1)."""

from __future__ import annotations

from email.utils import formatdate

from embedserve.wire.http2.header_blocks import encode


class ResponseDate:
    """Date header, encoded once for all responses until its owner refreshes it.

    Attributes:
        line: header line of HTTP/1.
        block: end of a header block of HTTP/2.
    """

    __slots__ = ("block", "line")

    def __init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Encodes the present time."""
        value = formatdate(usegmt=True).encode()
        self.line = b"date: %b\r\n" % value
        self.block = encode([(b"date", value)])
