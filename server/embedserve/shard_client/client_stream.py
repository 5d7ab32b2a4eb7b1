"""A call in flight on an HTTP/2 connection, from its request to its reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from embedserve.shard_client.reply import INTERNAL, OK, Reply, ResponseHeaders, read_message
from embedserve.wire.grpc.grpc_framing import PREFIX_BYTES

if TYPE_CHECKING:
    from embedserve.shard_client.http2_client import Http2Client

OnReply = Callable[[Reply], None]


class ClientStream:
    """A call. ``cancel`` ends it without a reply.

    Attributes:
        id: stream identifier; 0 while the call waits for a free stream.
        on_reply: callback for the reply; None once it was called or the call was cancelled.
        send_window: bytes of DATA that may be sent on the stream; only current while there are
            unsent bytes.
        nbytes: bytes received of the response message and its prefix.
    """

    __slots__ = (
        "_chunks",
        "_client",
        "_headers",
        "id",
        "nbytes",
        "on_reply",
        "send_window",
    )

    def __init__(self, client: Http2Client, on_reply: OnReply) -> None:
        self._client = client
        self.on_reply: OnReply | None = on_reply
        self.id = 0
        self.send_window = 0
        self.nbytes = 0
        self._chunks: list[memoryview] = []
        self._headers: ResponseHeaders | None = None

    def cancel(self) -> None:
        """Cancels the call: its callback is not called. Does nothing after the reply."""
        if self.on_reply is not None:
            self._client.cancel(self)

    def append(self, chunk: memoryview) -> None:
        """Adds a chunk of the response message."""
        if chunk and self.on_reply is not None:
            self._chunks.append(chunk)
        self.nbytes += len(chunk)

    def on_headers(self, headers: ResponseHeaders, is_end: bool) -> Reply | None:
        """Takes headers or trailers. Returns the reply if the call ends with them."""
        if self._headers is None and self.nbytes:
            return Reply(INTERNAL, "the response has data before its headers")
        if self._headers is None and not is_end:
            if not headers.is_informational:
                self._headers = headers
            return None
        if not is_end:
            return Reply(INTERNAL, "the response has headers within its data")
        if headers.status != OK:
            if headers.status is None and self._headers is not None:
                return self._headers.reply()
            return headers.reply()
        return self._complete(headers)

    def on_end(self) -> Reply:
        """Returns the reply to a call that ends without trailers, such as a proxy's error page."""
        headers = self._headers
        if headers is None or headers.status is not None or headers.http_status == 200:
            return Reply(INTERNAL, "the response ended without trailers")
        return headers.reply()

    def _complete(self, trailers: ResponseHeaders) -> Reply:
        """Returns the reply to a call that ends with status OK."""
        chunks, self._chunks = self._chunks, []
        if self.on_reply is None:
            return trailers.reply()
        payload = read_message(chunks, self.nbytes)
        if payload is None:
            nbytes = max(0, self.nbytes - PREFIX_BYTES)
            return Reply(INTERNAL, f"the response of {nbytes} bytes is not one whole message")
        return trailers.reply(payload)
