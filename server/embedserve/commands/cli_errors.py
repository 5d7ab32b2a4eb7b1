"""Error reporting of the command line: a user's error is one line on stderr, without a traceback
and without the frame that typer draws."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import typer

from embedserve.commands.installation import INSTALL

UNREACHABLE_STATUS = 3
"""Exit status if the store does not respond or denies access; nothing is known to be wrong in it,
and a later attempt may succeed."""
LOADER_FAULTS = (
    "cannot open shared object",
    "undefined symbol",
    "wrong ELF class",
    "No module named",
)
"""Parts of messages of a package that is missing, or does not fit torch or this host: the reason
why torch cannot load a library, and what a worker reports."""

USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]
"""Base class of the errors in arguments, which typer does not export."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns an error in the arguments into one line on stderr and exit status 2."""
    try:
        yield
    except USAGE_ERROR as error:
        from embedserve_store.terminal.sanitize import sanitize

        message = error.format_message()
        if not message:  # a group without a command, for which typer prints its help
            raise
        if hasattr(error.__cause__, "errors"):  # pydantic's, whose message lacks the value
            message = f"{message}, found {error.__cause__.errors()[0]['input']!r}"
        if error.ctx is not None:  # None: a value is missing, or a switch has one
            message = f"{message} ({error.ctx.command_path} --help)"
        typer.echo(f"embedserve: {sanitize(message)}", err=True)
        raise typer.Exit(error.exit_code) from error


@contextlib.contextmanager
def cli_errors() -> Iterator[None]:
    """Turns errors that the user can fix into one line on stderr and exit status 1.

    The status is UNREACHABLE_STATUS without access to the store, and 130 after an interrupt.
    """
    from embedserve_store.errors import (
        LIBRARY_FAULT,
        StoreError,
        UnreachableError,
        described,
        is_process_limit,
    )
    from embedserve_store.terminal.sanitize import sanitize

    try:
        with _flushed_output():
            yield
    except BrokenPipeError:  # by `| head`: typer exits with status 1, without a message
        raise
    except (StoreError, OSError, ValueError, MemoryError, RuntimeError) as error:
        if isinstance(error, ValueError) and type(error) is not ValueError:
            raise
        if isinstance(error, RuntimeError) and not is_process_limit(error):
            raise
        message = described(error) or type(error).__name__
        if isinstance(error, OSError) and error.filename and error.strerror:
            message = f"{error.filename}: {error.strerror}"
        if any(fault in f"{error} {message}" for fault in (LIBRARY_FAULT, *LOADER_FAULTS)):
            message = f"{message.splitlines()[0]}: {INSTALL}"
        typer.echo(f"embedserve: {sanitize(message)}", err=True)
        is_unreachable = isinstance(error, UnreachableError)
        raise typer.Exit(UNREACHABLE_STATUS if is_unreachable else 1) from error
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        if name.startswith("embedserve"):
            raise
        typer.echo(f"embedserve: {_import_fault(error, name)}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("embedserve: interrupted", err=True)
        raise typer.Exit(130) from None


@contextlib.contextmanager
def _flushed_output() -> Iterator[None]:
    """Writes buffered output at the end of its block, to report an error as those of the block.

    Output that cannot be written is discarded. Python would try again at exit, print the error and
    exit with status 120.
    """
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise


def _import_fault(error: ImportError, name: str) -> str:
    """Returns what is wrong with an installed package and how to install it."""
    if isinstance(error, ModuleNotFoundError) and name:
        return f"{name} is not installed: {INSTALL}"
    reason = str(error).splitlines()[0]
    return f"{name or 'a package'} does not fit this host or this Python ({reason}): {INSTALL}"
