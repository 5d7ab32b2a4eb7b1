"""What the bytes of manifest.json must hash to: its seal, the sha256 that it has of itself.

It has the sha256 of every other file or table, too: local_store.py checks those of the files that
it reads whole, verification.py those of all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from embedserve_store.errors import StoreError
from embedserve_store.format.version_folder import to_json_bytes

SEAL = "sha256"
"""The manifest's last field: the sha256 of the file's bytes while it is BLANK."""
BLANK = "0" * 64
UNSEALED_FORMAT_VERSION = 1
"""Manifests of this format version have no seal."""


def sealed_json(data: Mapping[str, Any]) -> bytes:
    """``data`` as the bytes of manifest.json, sealed anew if it was sealed."""
    unsealed = {key: value for key, value in data.items() if key != SEAL}
    blank = to_json_bytes(unsealed | {SEAL: BLANK})
    before, _, after = blank.rpartition(BLANK.encode())
    return before + hashlib.sha256(blank).hexdigest().encode() + after


def is_sealed(text: bytes) -> bool:
    """False for the manifest.json (``text``) of a format version that had no seal yet."""
    data = json.loads(text)
    return SEAL in data or data.get("format_version") != UNSEALED_FORMAT_VERSION


def check_seal(text: bytes, where: str) -> None:
    """Raises StoreError, led by ``where``, where a byte of manifest.json (``text``, known to be
    a JSON object) is not as it was published; a manifest without a seal passes."""
    if not is_sealed(text):
        return
    digest = json.loads(text).get(SEAL)
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise StoreError(f"{where}: {SEAL} is {digest!r}, expected 64 hexadecimal digits")
    blank = text.replace(digest.encode(), BLANK.encode())
    check_sha256(hashlib.sha256(blank).hexdigest(), digest, where)


def check_sha256(found: str, expected: str, where: str) -> None:
    """Raises StoreError, led by ``where``, unless the two are equal."""
    if found != expected:
        raise StoreError(
            f"{where}: sha256 is {found}, the manifest has {expected}: changed since it was "
            "published"
        )
