"""`embedserve prune`: removes old versions of a model, and lists them."""

from __future__ import annotations

from embedserve_store import prune as prune_versions
from embedserve_store.terminal.console import listed, say


def prune(store: str, model: str, keep: int, is_trial: bool) -> None:
    """Removes versions older than the ``keep`` newest, or lists them if ``is_trial``. Versions that
    an alias names or a server has open are kept."""
    in_use: list[int] = []
    removed = prune_versions(store, model, keep, is_trial=is_trial, on_in_use=in_use.append)
    say(f"{model}: {'would remove' if is_trial else 'removed'} versions: {listed(removed)}")
    if in_use:
        say(f"{model}: in use, and kept: {listed(in_use)}")
