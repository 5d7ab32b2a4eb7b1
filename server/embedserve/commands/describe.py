"""`embedserve describe`: a draft of the description that `embedserve publish` needs."""

from __future__ import annotations

from pathlib import Path

import typer

from embedserve.terminal.console import say
from embedserve_store.errors import StoreError
from embedserve_store.sources.checkpoint import open_checkpoint
from embedserve_store.sources.description_draft import draft_description


def describe(checkpoint: Path, prefix: str, output: Path | None) -> None:
    """Prints the draft, or writes it to ``output``, which must not be there.

    Raises:
        StoreError: the checkpoint has no tables or cannot be read, or ``output`` is there.
    """
    text = draft_description(open_checkpoint(checkpoint), prefix)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise StoreError(f"{output}: is there already and may hold your changes") from error
    say(f"wrote {output}: make right what is marked check, remove the marks, then publish with it")
