"""Clients of management applications, and the OpenAPI document of a server."""

from __future__ import annotations

from typing import Any

import httpx
from fastapi import FastAPI


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def schema(rest: httpx.AsyncClient) -> dict[str, Any]:
    """Returns the document that the server sends."""
    described: dict[str, Any] = (await rest.get("/openapi.json")).json()
    return described
