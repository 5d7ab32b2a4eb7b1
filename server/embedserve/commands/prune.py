"""`embedserve prune`: removes old versions of a model, and says which."""

from __future__ import annotations

from embedserve.terminal.console import say
from embedserve_store import prune as prune_versions


def prune(store: str, model: str, keep: int, is_trial: bool) -> None:
    """Raises StoreError as the store's prune does."""
    removed = prune_versions(store, model, keep, is_trial=is_trial)
    numbers = ", ".join(map(str, removed)) or "none"
    say(f"{model}: {'would remove' if is_trial else 'removed'} versions: {numbers}")
