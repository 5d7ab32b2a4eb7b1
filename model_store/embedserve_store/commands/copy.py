"""`embedserve copy`: copies versions from one store to another, and reports."""

from __future__ import annotations

from embedserve_store import CopiedModel, ModelStore, StoreError, copy_versions
from embedserve_store.terminal.console import listed, say, transfer_progress


def copy(source: str, target: str, model: str | None, aliases: bool, deltas: bool) -> None:
    """Copies MODEL, MODEL@VERSION or MODEL@ALIAS; all models if ``model`` is None.

    Raises:
        StoreError: as copy_versions; also if the name or the version in ``model`` is empty, or if
            ``source`` has no models.
    """
    name, version = (None, None) if model is None else _parse(model)
    for one in _models_of(source) if name is None else [name]:
        with transfer_progress() as progress:
            copied = copy_versions(
                source, target, one, version, aliases=aliases, deltas=deltas, progress=progress
            )
        report(copied, target)


def _parse(model: str) -> tuple[str, str | None]:
    """Returns the name, and the version or alias if one is given. An empty one comes from an unset
    variable of a script, and does not mean all."""
    name, at, version = model.partition("@")
    if not name or (at and not version):
        raise StoreError(f"model is {model!r}, expected MODEL, MODEL@VERSION or MODEL@ALIAS")
    return name, version or None


def _models_of(source: str) -> list[str]:
    """Returns the models of the store. A store without models is an error, because it may be the
    folder of a volume that is not mounted."""
    store = ModelStore(source)
    models = store.models()
    if not models:
        raise StoreError(f"no models in {store.where}")
    return models


def report(copied: CopiedModel, target: str) -> None:
    """Prints what was copied."""
    say(f"{copied.model}: copied versions to {target}: {listed(copied.copied)}")
    if copied.present:
        say(f"{copied.model}: there already: {listed(copied.present)}")
    if copied.notes:
        say(f"{copied.model}: copied notes: {copied.notes}")
    if copied.deltas:
        say(f"{copied.model}: copied deltas: {copied.deltas:,}")
    if copied.aliases:
        say(f"{copied.model}: copied changes of aliases: {listed(copied.aliases)}")
    if copied.left_out:
        say(f"{copied.model}: left out, as their version is not there: {listed(copied.left_out)}")
