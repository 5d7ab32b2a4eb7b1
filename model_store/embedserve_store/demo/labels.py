"""Writes readable titles of the demo's best-known movies, for `embedserve serve --labels`.

The labels are a file beside the models of a store. Never imports torch.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from embedserve_store.errors import StoreError

TABLE = "movie"


def titles() -> dict[str, str]:
    """Returns the bundled titles by imdb_id."""
    text = (files(__package__) / "data" / "titles.tsv").read_text("utf-8")
    return dict(line.split("\t") for line in text.splitlines()[1:])


def labels_path(store: str | os.PathLike[str], model: str) -> Path:
    return Path(store) / f"{model}.labels.json"


def write_labels(store: str | os.PathLike[str], model: str) -> None:
    """Writes the labels of the demo ``model`` beside it in ``store``.

    Raises:
        StoreError: the file cannot be written.
    """
    path = labels_path(store, model)
    try:
        path.write_text(json.dumps({model: {TABLE: titles()}}, ensure_ascii=False), "utf-8")
    except OSError as error:
        with suppress(OSError):  # as the file could not be written
            path.unlink()  # demo --if-missing would keep what a full disk took of it
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error
