"""Formats and parses byte counts in human-readable units."""

from __future__ import annotations

import re

UNIT_BYTES = {
    "": 1,
    "B": 1,
    **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", 1)},
}


def human_bytes(count: float) -> str:
    """Returns ``count`` bytes in the largest binary unit, up to TiB, that keeps the number at 1 or
    more.

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


def parse_bytes(text: str, name: str) -> int:
    """Returns the number of bytes of a human-readable size: 80GB is 80 * 1000**3, 80GiB is 80 *
    1024**3.

    Raises:
        ValueError: not a number of at least 1 byte, with one of these units or without a unit. The
            message begins with ``name``, the option.

    >>> [parse_bytes(text, "size") for text in ("24GiB", "1.5 GB", "4096")]
    [25769803776, 1500000000, 4096]
    """
    units = {unit.lower(): count for unit, count in UNIT_BYTES.items()}
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in units or not (count := int(float(match[1]) * units[match[2]])):
        raise ValueError(f"{name} is {text!r}, expected a size such as 80GB, 24GiB or bytes")
    return count
