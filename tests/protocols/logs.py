"""Reads the log records of a server."""

from typing import Any

import pytest


def fields_of(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    """Returns the fields of the records whose message begins with ``message``."""
    return [
        vars(record)["fields"] for record in caplog.records if record.message.startswith(message)
    ]
