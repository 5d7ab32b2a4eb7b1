"""`embedserve copy`: copies versions from one store to another, and reports."""

from __future__ import annotations

from embedserve_store import CopiedModel, ModelStore, copy_versions
from embedserve_store.terminal.console import listed, say, transfer_progress
from embedserve_store.terminal.sigterm import sigterm_interrupts


def copy(source: str, target: str, model: str, aliases: bool, deltas: bool) -> None:
    """Copies MODEL, MODEL@VERSION or MODEL@ALIAS; all models if ``model`` is empty.

    Raises:
        StoreError: as copy_versions.
    """
    name, _, version = model.partition("@")
    for one in [name] if name else ModelStore(source).models():
        with sigterm_interrupts(), transfer_progress() as progress:
            copied = copy_versions(
                source,
                target,
                one,
                version or None,
                aliases=aliases,
                deltas=deltas,
                progress=progress,
            )
        report(copied, target)


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
        say(f"{copied.model}: copied aliases: {listed(copied.aliases)}")
    if copied.left_out:
        say(f"{copied.model}: left out, as their version is not there: {listed(copied.left_out)}")
