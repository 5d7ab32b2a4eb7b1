"""Error reporting of the command line: a user's error is one line on stderr, without a
traceback."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import typer

ENGINE = ("torch", "fbgemm_gpu", "torchrec")
"""Packages that the extras cpu and cuda install."""
INSTALL = (
    "on a CPU pip install '.[server,cpu]' and then pip install --no-deps torchrec==1.8.0, "
    "for CUDA pip install '.[server,cuda]'"
)


@contextlib.contextmanager
def cli_errors() -> Iterator[None]:
    """Turns errors that the user can fix into one line on stderr and exit status 1; an interrupt
    exits with status 130."""
    from embedserve_store.errors import StoreError

    try:
        yield
    except (StoreError, OSError, ValueError) as error:
        if isinstance(error, ValueError) and type(error) is not ValueError:
            raise
        typer.echo(f"embedserve: {error}", err=True)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in ENGINE:
            raise
        typer.echo(f"embedserve: {name} is not installed: {INSTALL}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("embedserve: interrupted", err=True)
        raise typer.Exit(130) from None


def check_engine() -> None:
    """Raises ModuleNotFoundError if a package of the engine is missing. It imports none of them,
    because the process that forks workers must not."""
    for name in ENGINE:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
