"""Which collections a prefix means: the same for a module and for every kind of checkpoint.

A prefix is the dotted path of a collection from the beginning of the keys, as a module's state dict
has them and a checkpoint keeps them. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable

TOP = "."
"""Names the top level, whose collection has the path ""."""


def at_prefix(paths: Iterable[str], prefix: str) -> list[str]:
    """Those of ``paths`` that ``prefix`` means: itself, or where there is no such path all under
    it; "" means all.

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
    """``paths`` as a prefix says them."""
    return [path or TOP for path in dict.fromkeys(paths)]
