"""Options of the command line that are given or not, without a value, --help itself among them."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def switch(name: str, *, help: str, **more: Any) -> Any:  # noqa: A002  # typer's own name
    """Returns the option ``name``, which --help shows without a type."""
    return typer.Option(name, metavar="", help=help, **more)


class Command(TyperCommand):
    """A command whose --help is shown as a switch, too."""

    def get_help_option(self, ctx: Any) -> Any:
        return _untyped(super().get_help_option(ctx))


class Group(TyperGroup):
    """Commands under one name, whose --help is shown as a switch, too."""

    def get_help_option(self, ctx: Any) -> Any:
        return _untyped(super().get_help_option(ctx))


def _untyped(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option
