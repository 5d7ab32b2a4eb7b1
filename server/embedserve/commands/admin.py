"""`embedserve admin`: loads, unloads and reloads what a running server serves."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

from embedserve.commands.server_address import address_of
from embedserve.terminal.console import say

TIMEOUT_S = 1800.0
"""To load a version; a server gives it up after as long."""


def ask_server(url: str, action: str, model: str, token_file: Path | None) -> None:
    """Has the server at ``url``, of its management port, do ``action`` and says what came of it.

    Args:
        token_file: has the token to show, if one is asked for.

    Raises:
        ConnectionError: the server cannot be asked, or refuses; says why.
        ValueError: ``url`` is none.
    """
    address = address_of(url, "http://localhost:8002")
    headers = {"Content-Type": "application/json"}
    if token_file is not None:
        headers["Authorization"] = f"Bearer {token_file.read_text().strip()}"
    body = json.dumps({"model": model} if model else {}).encode()
    request = urllib.request.Request(f"{address}/admin/{action}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            said = json.load(answer)
    except urllib.error.HTTPError as error:
        raise ConnectionError(f"{url}: {_reason(error)}") from error
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise ConnectionError(f"{url}: {getattr(error, 'reason', error)}") from error
    if "version" in said:
        say(f"{said['model']} is answered by version {said['version']}")
    else:
        say(f"{model + ': ' if model else ''}{said['status']}")


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        reason: str = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"
    if error.code == 404:
        return f"{reason}; ask the port of --management-port"
    return reason
