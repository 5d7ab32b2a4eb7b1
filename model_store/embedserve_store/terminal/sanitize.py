"""Makes untrusted text safe to print on a terminal."""

from __future__ import annotations


def sanitize(text: str) -> str:
    """Returns ``text``, which may come from files and servers, with unprintable characters shown by
    their code, so that none moves the cursor."""
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text)
