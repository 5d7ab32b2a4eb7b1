"""`embedserve admin`: loads, unloads and reloads versions on a running server, and holds deltas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from embedserve.commands.running_server import ServerClient
from embedserve_store.terminal.console import say

TIMEOUT_S = 3600.0
"""Seconds for pulling and loading a version. The server gives up loading after half as long, which
it counts from the end of the pull."""
BYTES_MAX = 1 << 20
HOLD, GO_ON = "deltas hold", "deltas go-on"
RELOAD = "reload"
ACTIONS = ("load", "unload", RELOAD, HOLD, GO_ON)


def parse_action(words: Sequence[str]) -> tuple[str, str]:
    """Returns the action, an element of ACTIONS, and the model; "" for an action without one.

    Raises:
        ValueError: there is no such action, or it takes another number of models.
    """
    count = 2 if words[0] == "deltas" else 1
    action, models = " ".join(words[:count]), words[count:]
    if action not in ACTIONS:
        raise ValueError(f"action is {action!r}, expected {', '.join(ACTIONS[:-1])} or {GO_ON}")
    if bool(models) == (action == RELOAD):
        raise ValueError(f"{action} takes {'no model' if models else 'the name of a model'}")
    if len(models) > 1:
        raise ValueError(f"{action} takes one model, not {' '.join(models)}")
    return action, models[0] if models else ""


def ask_server(client: ServerClient, action: str, model: str) -> None:
    """Performs ``action`` on the server of ``client`` and prints the outcome.

    Args:
        action: an element of ACTIONS.

    Raises:
        ConnectionError, OSError, ValueError: as ServerClient.request.
        ValueError: the server is not embedserve.
    """
    body = json.dumps({"model": model} if model else {}).encode()
    path = f"/admin/{action.replace(' ', '/')}"
    response = client.request(path, timeout_s=TIMEOUT_S, bytes_max=BYTES_MAX, body=body)
    try:
        line = _outcome(json.loads(response), action, model)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{client.url}: is no embedserve: it answers something else") from error
    say(line)


def _outcome(response: Any, action: str, model: str) -> str:
    if action in (HOLD, GO_ON):
        line = f"{response['model']}: {response['state']} at seq {response['seq']}"
        if (response["state"] == "held") == (action == HOLD):
            return line
        return f"{line}; the process that applies deltas has not responded yet, see /models"
    if "version" in response:
        return f"{response['model']} is now served by version {response['version']}"
    status = response["status"]
    if action == RELOAD:
        return "the server polls its store now, see /models"
    return f"{model}: {status}"
