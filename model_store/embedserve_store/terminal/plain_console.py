"""Makes the consoles of commands, which print a text as it is."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Returns a console without markup, emoji and highlighting: names of features, such as
    ``clicks[last]`` and ``user:id:1``, may look like them.

    Args:
        width: columns of a line. Default: those of the terminal.
    """
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)
