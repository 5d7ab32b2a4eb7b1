"""manifest.json as its bytes: read, checked against its seal, and refused where it is damaged."""

from __future__ import annotations

from embedserve_store.format.json_fields import parse_json
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.manifest_checksum import check_seal


def parse_manifest(text: bytes, where: str) -> Manifest:
    """The manifest in ``text``. ``where`` names the file in errors.

    Raises:
        StoreError: it is not JSON, not a manifest, or not as it was published.
    """
    manifest = Manifest.from_json(parse_json(text, where), where)
    check_seal(text, where)
    return manifest
