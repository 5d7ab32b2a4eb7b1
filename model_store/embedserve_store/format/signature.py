"""Separates a sealed manifest from its signature, which is a field before the seal.

The signed bytes are those of the file as it would be without the field, seal included. Nothing is
parsed for that, so they are the bytes that were signed or the signature does not match. Knows
nothing of keys (deltas/signing.py does).
"""

from __future__ import annotations

import re

from embedserve_store.format.manifest_checksum import BLANK, SEAL, seal

SIGNATURE = "signature"
"""Name of the field, the last one before the seal: 128 hexadecimal digits, of 64 bytes."""
_END = re.compile(rf',\n  "{SIGNATURE}": "([0-9a-f]{{128}})",\n  "{SEAL}": "[0-9a-f]{{64}}"\n}}\n')
_END_BYTES = len(f',\n  "{SIGNATURE}": "{"0" * 128}",\n  "{SEAL}": "{BLANK}"\n}}\n')


def split_signature(text: bytes) -> tuple[bytes, bytes] | None:
    """Returns the signed bytes of a manifest and the signature, 64 bytes.

    Returns None if the file does not end with a signature as embedserve writes it.
    """
    end = _END.fullmatch(text[-_END_BYTES:].decode("ascii", "replace"))
    if end is None:
        return None
    blank = text[:-_END_BYTES] + f',\n  "{SEAL}": "{BLANK}"\n}}\n'.encode()
    return seal(blank), bytes.fromhex(end[1])
