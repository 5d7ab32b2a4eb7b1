"""Options of the command line that are given or not, without a value."""

from __future__ import annotations

from typing import Any

import typer


def switch(name: str, *, help: str) -> Any:  # noqa: A002  # typer's own name
    """Returns the option ``name``, which --help shows without a type."""
    return typer.Option(name, metavar="", help=help)
