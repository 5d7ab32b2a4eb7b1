"""Adds a note to a version. The version's own files never change. Never imports torch."""

from __future__ import annotations

import os

from embedserve_store.errors import StoreError
from embedserve_store.format.note import NOTES_FOLDER, Note, note_path
from embedserve_store.format.text_limit import check_texts
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.added_file import ATTEMPTS, now, user, writer
from embedserve_store.publishing.record_event import record_event


def add_note(
    store: str | os.PathLike[str],
    model: str,
    version: int | str,
    text: str,
    *,
    who: str | None = None,
) -> Note:
    """Stores ``text`` as a note of a version and returns the note.

    Args:
        store: a folder or a URL.
        version: a version number, or an alias, which is resolved now.
        who: author recorded in the note. Default: USER@HOST.

    Raises:
        StoreError: the version does not exist, the text is empty or too long, or the store cannot
            be read or written.
    """
    who = user() if who is None else who
    check_texts(text=text, who=who)
    if not text.strip():
        raise StoreError("text is empty: a note says something")
    models = ModelStore(store)
    number = models.manifest(model, version).version
    when = now()
    write = writer(models.where, f"{model}/{NOTES_FOLDER}")
    for _ in range(ATTEMPTS):
        last = max(models.note_numbers(model, number), default=0)
        note = Note(model, number, last + 1, who, when, text)
        if write(f"{model}/{note_path(number, note.number)}", note.to_bytes()):
            record_event(store, "note", model, (number,), who=who, detail=text)
            return note
    raise StoreError(f"{models.where}/{model}: others wrote {ATTEMPTS} notes of version {number}")
