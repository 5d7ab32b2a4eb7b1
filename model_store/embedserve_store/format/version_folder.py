"""Names of version folders, and the encoding of the small files in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERSION_PATTERN = re.compile(r"[1-9][0-9]*")


def version_numbers(model_folder: Path) -> list[int]:
    """Returns the names in ``model_folder`` that are positive integers, ascending.

    Raises:
        OSError: the folder cannot be listed.
    """
    names = os.listdir(model_folder)
    return sorted(int(name) for name in names if VERSION_PATTERN.fullmatch(name))


def to_json_bytes(data: Mapping[str, Any]) -> bytes:
    """Encodes a small file of a version as indented JSON, so that people can read it."""
    return (json.dumps(data, indent=2) + "\n").encode()
