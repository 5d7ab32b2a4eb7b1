"""Commands of the command line: their switches, --help included, show no type, and an error that a
user can fix is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from embedserve.commands.cli_errors import cli_errors, usage_errors

EMPTY_PATH = "it is empty, expected a path: is a variable unset?"


def switch(name: str, *, help: str, **more: Any) -> Any:  # noqa: A002  # typer's parameter name
    """Returns the option ``name``, which --help shows without a type."""
    return typer.Option(name, metavar="", help=help, **more)


class Command(TyperCommand):
    """A command whose --help option is also shown without a type, and whose errors that a user can
    fix are one line.

    An empty path is an error, as for an unset variable in a script: it would be the current folder.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = self.make_parser(ctx).parse_args(args=list(args))[0]
        rest: list[str] = super().parse_args(ctx, args)
        known: list[Any] = self.params
        for one in known:
            if ctx.params.get(one.name) == Path() and given.get(one.name) == "":
                raise typer.BadParameter(EMPTY_PATH, ctx=ctx, param=one)
        return rest

    def invoke(self, ctx: Any) -> Any:
        with cli_errors():
            return super().invoke(ctx)

    def get_help_option(self, ctx: Any) -> Any:
        return _untyped(super().get_help_option(ctx))


class Group(TyperGroup):
    """A group of commands whose --help option is also shown without a type, and whose errors in
    arguments are one line."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        with usage_errors():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with usage_errors():
            return super().invoke(ctx)

    def get_help_option(self, ctx: Any) -> Any:
        return _untyped(super().get_help_option(ctx))


def _untyped(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option
