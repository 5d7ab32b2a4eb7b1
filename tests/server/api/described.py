"""The OpenAPI document of a server."""

from __future__ import annotations

from typing import Any

import httpx


async def schema(rest: httpx.AsyncClient) -> dict[str, Any]:
    """Returns the document that the server sends."""
    described: dict[str, Any] = (await rest.get("/openapi.json")).json()
    return described
