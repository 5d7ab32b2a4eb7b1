"""JSON files, and fields of parsed JSON or YAML, each of the type that it must have."""

from __future__ import annotations

import json
from typing import Any

from embedserve_store.errors import StoreError


def parse_json(text: bytes, where: str) -> Any:
    """What a JSON file says, or StoreError, led by ``where``, if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where}: not JSON, or half-written: {error}") from error


def typed(data: dict[str, Any], key: str, kind: type, where: str) -> Any:
    """``data[key]``, or StoreError, led by ``where``, unless it is of type ``kind``."""
    value = data.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise StoreError(f"{where}: {key} is {value!r}, expected {kind.__name__}")
    return value
