"""Selects collections by prefix, in the same way for a module and for every kind of checkpoint.

A prefix is the dotted path of a collection, from the beginning of the keys. A checkpoint keeps the
keys of the module's state dict. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable

TOP = "."
"""Prefix that names the top level, whose collection has the path ""."""


def at_prefix(paths: Iterable[str], prefix: str) -> list[str]:
    """Returns the paths that ``prefix`` selects.

    A prefix selects the equal path, or if there is none, all paths under it. "" selects all paths.

    >>> at_prefix(["a.ebc", "a.ec", "b.ebc"], "a.ebc"), at_prefix(["a.ebc", "a.ec", "b.ebc"], "a")
    (['a.ebc'], ['a.ebc', 'a.ec'])
    """
    every = list(dict.fromkeys(paths))
    if not prefix:
        return every
    path = prefix.strip(TOP)
    under = [one for one in every if path and one.startswith(f"{path}.")]
    return [path] if path in every else under


def shown(paths: Iterable[str]) -> list[str]:
    """Returns ``paths`` as prefixes: "." for the top level, without duplicates."""
    return [path or TOP for path in dict.fromkeys(paths)]
