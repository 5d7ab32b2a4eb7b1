"""What people call the ids of tables, such as titles of movies: read from a file, for the console.

Ids are callers' own, so that labels are of no version. Nothing but the console is told of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orjson import dumps as encode

LABELS_BYTES_MAX = 8 << 20
"""Of the file, which every worker holds in memory."""

Labels = Mapping[str, bytes]
"""By model, the label of each id of its tables, as JSON: encoded once, as they are many."""
NO_LABELS = b'{"tables":{}}'


def read_labels(path: str) -> Labels:
    """Those of the JSON file ``path``: {"MODEL": {"TABLE": {"ID": "LABEL"}}}.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file, or too large.
    """
    with Path(path).open("rb") as file:
        text = file.read(LABELS_BYTES_MAX + 1)
    if len(text) > LABELS_BYTES_MAX:
        raise ValueError(f"labels ({path}): has over {LABELS_BYTES_MAX} bytes")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"labels ({path}): not JSON: {error}") from None
    for model, tables in _items(data, f"labels ({path})"):
        for table, labels in _items(tables, f"labels ({path}): {model!r}"):
            for one, label in _items(labels, f"labels ({path}): {model!r}: {table!r}"):
                if not isinstance(label, str):
                    raise ValueError(
                        f"labels ({path}): {model!r}: {table!r}: {one!r} is {label!r}: not a string"
                    )
    try:
        return {model: encode({"tables": tables}) for model, tables in data.items()}
    except TypeError as error:
        raise ValueError(f"labels ({path}): not text: {error}") from None


def _items(data: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, not {type(data).__name__}")
    return list(data.items())
