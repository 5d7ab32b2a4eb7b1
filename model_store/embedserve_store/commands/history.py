"""`embedserve history`: shows who changed a store, when, from where and how."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from embedserve_store.errors import missing_model
from embedserve_store.terminal.aligned_columns import grid, plain, show, write
from embedserve_store.terminal.stores import opened


def history(store: str, model: str, last: int, as_json: bool, cache: Path | None) -> None:
    """Prints the ``last`` changes, the latest first; as JSON an object in each line.

    Raises:
        StoreError: the store cannot be read, or has no such model.
    """
    with opened(store, cache) as models:
        events = models.history(model, last)
        if model and not events and not models.versions(model):
            raise missing_model(store, model, models.models())
    if as_json:
        sys.stdout.writelines(json.dumps(asdict(one)) + "\n" for one in events)
        return
    title = f"history of {model or store}"
    table = grid("when", "what", "model", "versions", "who", "host", "source", "detail")
    for one in events:
        versions = ", ".join(map(str, one.versions))
        cells = (one.when, one.what, one.model, versions, one.who, one.host, one.source, one.detail)
        table.add_row(*map(plain, cells))
    if table.row_count:
        show(title, table)
    else:
        write(f"{title}: none")
