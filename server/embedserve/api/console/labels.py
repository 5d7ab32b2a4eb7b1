"""Human-readable labels of ids, such as movie titles, read from a file for the console.

Ids are the callers' own, so that labels do not depend on the version. Only the console uses them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orjson import dumps as encode

LABELS_BYTES_MAX = 8 << 20
"""Bytes of the labels file; every worker holds it in memory."""

Labels = Mapping[str, bytes]
"""Labels of the ids of each model's tables, by model, as JSON that is encoded once because it is
large."""
NO_LABELS = b'{"tables":{}}'


def read_labels(path: str) -> Labels:
    """Reads labels from the JSON file ``path``: {"MODEL": {"TABLE": {"ID": "LABEL"}}}.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has another structure or is too large.
    """
    with Path(path).open("rb") as file:
        text = file.read(LABELS_BYTES_MAX + 1)
    if len(text) > LABELS_BYTES_MAX:
        raise ValueError(f"{path}: has over {LABELS_BYTES_MAX} bytes")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    for model, tables in _items(data, path):
        for table, labels in _items(tables, f"{path}: {model!r}"):
            for one, label in _items(labels, f"{path}: {model!r}: {table!r}"):
                if not isinstance(label, str):
                    raise ValueError(
                        f"{path}: {model!r}: {table!r}: {one!r} is {label!r}: not a string"
                    )
    try:
        return {model: encode({"tables": tables}) for model, tables in data.items()}
    except TypeError as error:
        raise ValueError(f"{path}: not text: {error}") from None


def _items(data: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, not {type(data).__name__}")
    return list(data.items())
