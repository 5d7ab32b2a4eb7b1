"""Reads what a person wrote by hand, and refuses a checkpoint given in its place unread."""

from __future__ import annotations

from pathlib import Path

TEXT_BYTES_MAX = 16 << 20


def read_user_file(path: Path) -> str:
    """The UTF-8 text of ``path``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than anyone writes, or not text.
    """
    with path.open("rb") as file:
        data = file.read(TEXT_BYTES_MAX + 1)
    if len(data) > TEXT_BYTES_MAX:
        raise ValueError(f"over {TEXT_BYTES_MAX} bytes: is it a checkpoint?")
    return data.decode("utf-8")
