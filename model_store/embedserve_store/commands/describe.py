"""`embedserve describe`: drafts the description that `embedserve publish` needs."""

from __future__ import annotations

from pathlib import Path

import typer

from embedserve_store.errors import StoreError
from embedserve_store.goldens.expected import read_expected
from embedserve_store.sources.checkpoint import open_checkpoint
from embedserve_store.sources.description import read_description
from embedserve_store.sources.description_draft import draft_description
from embedserve_store.terminal.console import say
from embedserve_store.terminal.sanitize import sanitize
from embedserve_store.writing.small_files import write_output


def describe(checkpoint: Path, prefix: str, output: Path | None, expected: Path | None) -> None:
    """Prints the draft, or writes it to ``output``, which must not exist.

    Args:
        expected: file of a training model's answers, which fill in what the checkpoint lacks.

    Raises:
        StoreError: the checkpoint has no tables or cannot be read, ``output`` exists or cannot be
            written.
    """
    answers = None if expected is None else read_expected(expected)
    draft = draft_description(open_checkpoint(checkpoint), prefix, answers)
    text = "".join(f"{sanitize(line)}\n" for line in draft.splitlines())  # it names the checkpoint
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        write_output(output, text.encode(), may_replace=False)
    except FileExistsError as error:
        raise StoreError(f"{output}: is there already and may hold your changes") from error
    is_marked = bool(read_description(output).guesses)
    todo = "make right what is marked check, remove the marks, then publish with it"
    say(f"wrote {output}: {todo if is_marked else 'nothing is left to check, publish with it'}")
