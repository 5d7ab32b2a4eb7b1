"""Bounds the texts that people and jobs write into small files: notes, reasons and authors.

Never imports torch.
"""

from __future__ import annotations

from typing import Any

from embedserve_store.errors import StoreError
from embedserve_store.format.json_fields import typed

TEXT_MAX = 1000
"""Maximum length of a text in characters; a text is shown on one line."""


def check_texts(where: str = "", **texts: str) -> None:
    """Raises StoreError for a text that is longer than TEXT_MAX, and names the text."""
    for what, text in texts.items():
        if len(text) > TEXT_MAX:
            prefix = f"{where}: " if where else ""
            raise StoreError(f"{prefix}{what} has {len(text)} characters, the limit is {TEXT_MAX}")


def short_text(data: dict[str, Any], key: str, where: str) -> str:
    """Returns the text ``data[key]``; raises StoreError if it is no text or above TEXT_MAX."""
    text: str = typed(data, key, str, where)
    check_texts(where, **{key: text})
    return text
