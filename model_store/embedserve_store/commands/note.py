"""`embedserve note`: keeps a text beside a version, which inspect shows."""

from __future__ import annotations

from embedserve_store import add_note
from embedserve_store.terminal.console import say


def note(store: str, model: str, version: str, text: str) -> None:
    """Adds the note."""
    added = add_note(store, model, version, text)
    say(f"{model}: note {added.number} of version {added.version}")
