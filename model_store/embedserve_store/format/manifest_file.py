"""Parses the bytes of manifest.json and checks its seal."""

from __future__ import annotations

from embedserve_store.format.json_fields import parse_json
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.manifest_checksum import check_seal


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Returns the manifest in ``text``.

    Args:
        where: name of the file in errors.

    Raises:
        StoreError: the text is not JSON, is not a manifest, or has changed since it was published.
    """
    manifest = Manifest.from_json(parse_json(text, where), where)
    check_seal(text, where)
    return manifest
