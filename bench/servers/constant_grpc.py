"""grpcio server whose Embed returns the bytes of a file.

    python bench/servers/constant_grpc.py FILE KIND PORT

KIND is the number of threads of its pool, or asyncio or uvloop for grpc.aio on that event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def handlers(embed: Callable[..., Any]) -> grpc.GenericRpcHandler:
    methods = {"Embed": grpc.unary_unary_rpc_method_handler(embed)}
    return grpc.method_handlers_generic_handler("embedserve.v1.EmbeddingService", methods)


def serve_threads(reply: bytes, threads: int, address: str) -> None:
    server = grpc.server(ThreadPoolExecutor(threads), options=OPTIONS)
    server.add_generic_rpc_handlers((handlers(lambda body, context: reply),))
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()


async def serve_asyncio(reply: bytes, address: str) -> None:
    async def embed(body: bytes, context: object) -> bytes:
        return reply

    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((handlers(embed),))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    path, kind, port = sys.argv[1:]
    content, target = Path(path).read_bytes(), f"127.0.0.1:{port}"
    if kind.isdigit():
        serve_threads(content, int(kind), target)
    elif kind == "uvloop":
        import uvloop

        uvloop.run(serve_asyncio(content, target))
    else:
        asyncio.run(serve_asyncio(content, target))
