"""Entry point of the `embedserve` command and of `python -m embedserve`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line. Where only the client is installed, exits with a message that names
    the missing package and how to install the server."""
    try:
        from embedserve.commands.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("embedserve"):
            raise
        sys.exit(
            f"embedserve: {error.name} is not installed: this is the client only; the server "
            "is installed by make install, see the README"
        )
    app()


if __name__ == "__main__":
    main()
