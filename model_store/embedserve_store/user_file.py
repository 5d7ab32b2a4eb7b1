"""Reads text files that users write, such as constraints.

Rejects a large file, such as a checkpoint passed by mistake, without reading it whole.
"""

from __future__ import annotations

from pathlib import Path

TEXT_BYTES_MAX = 16 << 20


def read_user_file(path: Path) -> str:
    """Returns the UTF-8 text of the file at ``path``.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than TEXT_BYTES_MAX (16 MiB), or is not UTF-8 text.
    """
    with path.open("rb") as file:
        data = file.read(TEXT_BYTES_MAX + 1)
    if len(data) > TEXT_BYTES_MAX:
        raise ValueError(f"over {TEXT_BYTES_MAX} bytes: is it a checkpoint?")
    return data.decode("utf-8")
