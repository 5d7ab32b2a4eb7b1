"""Seals a manifest that a test has written or changed."""

from __future__ import annotations

import json
from pathlib import Path

from embedserve_store.format.seal import sealed_json


def seal(folder: Path) -> Path:
    """The version in ``folder`` with a manifest that is sealed as it is now."""
    path = folder / "manifest.json"
    path.write_bytes(sealed_json(json.loads(path.read_bytes())))
    return folder
