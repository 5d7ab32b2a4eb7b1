"""What a person did wrong is one line on stderr, and no traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns the errors that a person can mend into one line and exit status 1."""
    from embedserve_store.errors import StoreError

    try:
        yield
    except (StoreError, OSError, ValueError) as error:
        if isinstance(error, ValueError) and type(error) is not ValueError:
            raise
        typer.echo(f"embedserve: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("embedserve: interrupted", err=True)
        raise typer.Exit(130) from None
