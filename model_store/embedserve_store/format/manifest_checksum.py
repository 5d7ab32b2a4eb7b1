"""Seals manifest.json: the file holds a sha256 of its own bytes.

The manifest also holds the sha256 of every other file or table. local_store.py checks the files
that it reads whole, and verification.py checks everything.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from embedserve_store.errors import StoreError
from embedserve_store.format.json_fields import parse_json
from embedserve_store.format.version_folder import to_json_bytes

SEAL = "sha256"
"""Name of the manifest's last field: the sha256 of the file's bytes with BLANK in this field."""
BLANK = "0" * 64
SHA256_PATTERN = re.compile("[0-9a-f]{64}")
UNSEALED_FORMAT_VERSION = 1
"""Format version of manifests without a seal."""


def sealed_json(data: Mapping[str, Any]) -> bytes:
    """Returns ``data`` as the bytes of manifest.json, with a new seal in place of any old seal."""
    unsealed = {key: value for key, value in data.items() if key != SEAL}
    return seal(to_json_bytes(unsealed | {SEAL: BLANK}))


def seal(blank: bytes) -> bytes:
    """Returns ``blank``, a manifest that ends with BLANK in its field SEAL, with its seal there."""
    before, _, after = blank.rpartition(BLANK.encode())
    return before + hashlib.sha256(blank).hexdigest().encode() + after


def parse_sealed(text: bytes, where: str, format_version: int) -> dict[str, Any]:
    """Returns the JSON object in ``text``, after a check of its format version and its seal.

    Raises:
        StoreError: the text is damaged, or of another format version.
    """
    data = parse_json(text, where)
    found = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(data, dict) or found != format_version:
        raise StoreError(
            f"{where}: format_version is {found!r}, this embedserve reads {format_version}"
        )
    check_seal(text, where)
    return data


def is_sealed(text: bytes) -> bool:
    """Returns whether manifest.json (``text``) must have a seal; False only for version 1."""
    data = json.loads(text)
    return SEAL in data or data.get("format_version") != UNSEALED_FORMAT_VERSION


def check_seal(text: bytes, where: str) -> None:
    """Raises StoreError if a byte of manifest.json has changed since it was published.

    A manifest without a seal passes.

    Args:
        text: bytes of the file, known to be a JSON object.
    """
    if not is_sealed(text):
        return
    digest = json.loads(text).get(SEAL)
    if not isinstance(digest, str) or not SHA256_PATTERN.fullmatch(digest):
        raise StoreError(f"{where}: {SEAL} is {digest!r}, expected 64 hexadecimal digits")
    blank = text.replace(digest.encode(), BLANK.encode())
    check_sha256(hashlib.sha256(blank).hexdigest(), digest, where)


def check_sha256(found: str, expected: str, where: str) -> None:
    """Raises StoreError, with a message that begins with ``where``, if the checksums differ."""
    if found != expected:
        raise StoreError(changed(found, expected, where))


def changed(found: str, expected: str, where: str) -> str:
    """Returns the message for bytes whose checksum differs from the manifest's."""
    return (
        f"{where}: sha256 is {found}, the manifest has {expected}: changed since it was published"
    )
