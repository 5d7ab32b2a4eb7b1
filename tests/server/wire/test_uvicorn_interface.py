"""Private names of uvicorn that wire/uvicorn_connection.py uses.

pyproject.toml therefore bounds uvicorn's version. Raise the bound once these tests pass with the
new version.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

CALLBACKS = (
    "connection_made",
    "connection_lost",
    "resume_writing",
    "on_message_begin",
    "on_header",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "on_response_complete",
)


@pytest.mark.parametrize("name", [*CALLBACKS, "_unset_keepalive_if_required"])
def test_the_protocol_has_the_method(name: str) -> None:
    assert inspect.isfunction(getattr(HttpToolsProtocol, name))


@pytest.mark.parametrize(
    ("made_by", "names"),
    [
        (HttpToolsProtocol.__init__, {"cycle", "parser", "pipeline", "transport", "flow"}),
        (HttpToolsProtocol.on_message_begin, {"url", "headers", "scope"}),
        (FlowControl.__init__, {"write_paused"}),
        (
            RequestResponseCycle.__init__,
            {
                "body",
                "disconnected",
                "keep_alive",
                "message_event",
                "response_complete",
                "response_started",
                "waiting_for_100_continue",
            },
        ),
    ],
)
def test_the_attributes_are_set(made_by: Callable[..., None], names: set[str]) -> None:
    source = inspect.getsource(made_by)
    set_there = set(re.findall(r"self\.(\w+)(?:: [^=]+)? =", source))
    assert names <= set_there


def test_flow_control_has_the_methods() -> None:
    assert inspect.isfunction(FlowControl.pause_reading)
    assert inspect.isfunction(FlowControl.resume_reading)
