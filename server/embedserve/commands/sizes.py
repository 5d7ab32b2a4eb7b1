"""Byte counts as a person reads them."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """
    >>> human_bytes(999), human_bytes(8_000_000), human_bytes(1 << 40)
    ('999 B', '7.6 MiB', '1.0 TiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
