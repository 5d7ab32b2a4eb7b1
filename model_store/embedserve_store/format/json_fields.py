"""Parses JSON files, and reads fields of parsed JSON or YAML with a check of their types."""

from __future__ import annotations

import json
from typing import Any

from embedserve_store.errors import StoreError


def parse_json(text: bytes, where: str) -> Any:
    """Parses JSON. Raises StoreError, with a message that begins with ``where``, if it fails."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where}: not JSON, or half-written: {error}") from error


def typed(data: dict[str, Any], key: str, kind: type, where: str) -> Any:
    """Returns ``data[key]``, and raises StoreError unless it is of type ``kind``.

    A bool is not accepted as an int.
    """
    value = data.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise StoreError(f"{where}: {key} is {value!r:.200}, expected {kind.__name__}")
    return value
