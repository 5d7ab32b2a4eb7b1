"""What others wrote, for a terminal."""

from __future__ import annotations


def sanitize(text: str) -> str:
    """``text``, which may come from files and servers, with what would move the cursor shown as its
    number."""
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text)
