"""`embedserve delete`: removes one version of a model."""

from __future__ import annotations

from embedserve_store import remove_version
from embedserve_store.terminal.console import say


def delete(store: str, model: str, version: int) -> None:
    """Removes the version."""
    remove_version(store, model, version)
    say(f"{model}: removed version {version}")
