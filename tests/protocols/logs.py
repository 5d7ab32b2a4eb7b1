"""Log records of the server."""

from __future__ import annotations

from typing import Any

import pytest


def fields_of(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    """Fields of the records whose message begins so."""
    return [
        vars(record)["fields"] for record in caplog.records if record.message.startswith(message)
    ]
