"""`embedserve admin`: loads, unloads and reloads versions on a running server."""

from __future__ import annotations

import json

from embedserve.commands.running_server import ServerClient
from embedserve_store.terminal.console import say

TIMEOUT_S = 3600.0
"""Seconds for pulling and loading a version. The server gives up loading after half as long, which
it counts from the end of the pull."""
BYTES_MAX = 1 << 20


def ask_server(client: ServerClient, action: str, model: str) -> None:
    """Performs ``action`` on the server of ``client`` and prints the outcome.

    Raises:
        ConnectionError, OSError, ValueError: as ServerClient.request.
        ValueError: the server is not embedserve.
    """
    body = json.dumps({"model": model} if model else {}).encode()
    answer = client.request(f"/admin/{action}", timeout_s=TIMEOUT_S, bytes_max=BYTES_MAX, body=body)
    try:
        said = json.loads(answer)
        if "version" in said:
            line = f"{said['model']} is answered by version {said['version']}"
        else:
            line = f"{model + ': ' if model else ''}{said['status']}"
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{client.url}: is no embedserve: it answers something else") from error
    say(line)
