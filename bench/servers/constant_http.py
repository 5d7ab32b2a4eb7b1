"""Bare ASGI application that reads the body and returns the bytes of a file.

It shows the least that any Python server on this uvicorn costs. embedserve's rates are compared
with it.

    python bench/servers/constant_http.py FILE CONTENT_TYPE PORT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import uvicorn


def constant_app(reply: bytes, content_type: str) -> Any:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(reply)).encode()),
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    return app


if __name__ == "__main__":
    path, kind, port = sys.argv[1:]
    uvicorn.run(
        constant_app(Path(path).read_bytes(), kind),
        port=int(port),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        server_header=False,
        date_header=False,
        backlog=4096,
    )
