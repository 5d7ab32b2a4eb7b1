"""asyncio.Protocol on uvloop that returns the bytes of a file for every POST over HTTP/1.1.

It shows the least that a Python server without an HTTP library costs: it finds the end of the
headers, reads Content-Length bytes of body and writes one reply.

    python bench/servers/constant_protocol.py FILE CONTENT_TYPE PORT
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import cast

import uvloop

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class ConstantProtocol(asyncio.Protocol):
    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        self._held = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        held = self._held
        held += data
        while (head_end := held.find(b"\r\n\r\n")) >= 0:
            length = CONTENT_LENGTH.search(held, 0, head_end)
            request_end = head_end + 4 + (int(length[1]) if length else 0)
            if len(held) < request_end:
                return
            del held[:request_end]
            self._transport.write(self._reply)


async def serve(reply: bytes, port: int) -> None:
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(
        lambda: ConstantProtocol(reply), "127.0.0.1", port, backlog=4096
    )
    await listening.serve_forever()


if __name__ == "__main__":
    path, kind, port = sys.argv[1:]
    body = Path(path).read_bytes()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    uvloop.run(serve(head.encode() + body, int(port)))
