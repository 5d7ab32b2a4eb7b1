"""`embedserve deltas`: lists, shows, verifies, undoes, compacts and removes deltas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from embedserve_store.deltas.compact import compact_deltas
from embedserve_store.deltas.delta_line import DeltaLine, deltas_in_state
from embedserve_store.deltas.prune import prune_deltas
from embedserve_store.deltas.signing import trusted_keys
from embedserve_store.deltas.undo import undo_deltas
from embedserve_store.errors import MissingFileError, StoreError
from embedserve_store.format.delta_manifest import DeltaManifest, IdCounts
from embedserve_store.model_store import ModelStore
from embedserve_store.terminal.aligned_columns import grid, plain, show, write
from embedserve_store.terminal.console import say, table_progress, transfer_progress
from embedserve_store.terminal.sizes import human_bytes

RUN_DIGITS = 8
"""Digits of a writer's token that a list shows."""


def list_deltas(store: str, model: str, seq: int | None, version: str | None, last: int) -> None:
    """Prints the last deltas of a line, newest last, or the tables of delta ``seq``.

    Args:
        version: version or alias whose line is meant; None for the newest version.
        last: number of deltas to print; 0 for all.

    Deltas that are missing within the line are named.
    """
    models = ModelStore(store)
    base = models.manifest(model, version)
    line = DeltaLine(models, base)
    if seq is not None:
        try:
            delta, _ = line.manifest(seq)
        except MissingFileError:
            raise line.missing(seq, line.seqs()) from None
        _show_delta(delta)
        return
    name = f"line {line.start.line} of {model}"
    after = f"version {base.version}" + (f" (seq {line.start.seq})" if line.start.seq else "")
    seqs = line.seqs()
    if not seqs:
        write(f"{name}: no deltas after {after}")
        return
    columns = "seq", "as of", "step", "rows", "bytes", "writer", "run"
    table = grid(*columns, numbers=("seq", "step", "rows", "bytes"))
    shown_seqs = seqs[-last:]
    is_whole = len(shown_seqs) == len(seqs)
    before = line.start.seq if is_whole else shown_seqs[0] - 1
    deltas = _stored(line, shown_seqs)
    undone = _undone(deltas)
    for number, delta in deltas.items():
        if number > before + 1:
            table.add_row(*map(plain, _gap_cells(before + 1, number - 1)))
        table.add_row(*map(plain, _cells(delta, is_undone=number in undone)))
        before = number
    shown = "" if is_whole else f", the last {last}"
    show(f"{name}: {_counted(len(seqs), 'delta')} after {after}{shown}", table)


def verify_deltas(store: str, model: str, version: str | None, key: Path | None) -> None:
    """Reads every byte of the deltas after a version, and checks that they form a chain.

    Args:
        key: file with the public keys that may have signed a delta; None if no signature is needed.

    Raises:
        StoreError: a delta is missing or damaged, does not continue the delta before it, lacks the
            signature, or holds rows that the version cannot have. The message names the first one.
    """
    models = ModelStore(store)
    base = models.manifest(model, version)
    line = DeltaLine(models, base, trusted_keys(key) if key else None)
    count = rows = nbytes = 0
    for delta, _ in line.deltas():
        for _ in line.rows(delta):
            pass
        line.ids(delta)
        count += 1
        rows += sum(delta.rows.values())
        nbytes += delta.nbytes
    if not count:
        raise StoreError(
            f"{store}/{model}: there is no delta after version {base.version} in line "
            f"{line.start.line}"
        )
    signed = f" and signed by a key in {key}" if key else ""
    say(
        f"{model}: deltas {line.start.seq + 1} to {line.start.seq + count} of line "
        f"{line.start.line} are as they were written{signed}, {rows:,} rows, {human_bytes(nbytes)}"
    )


def undo(
    store: str,
    model: str,
    to: int,
    why: str,
    version: str | None,
    is_alone: bool,
    key: Path | None,
    notify: str | None,
) -> None:
    """Appends a delta that reverts to the state after delta ``to``."""
    made = undo_deltas(
        store, model, to=to, why=why, version=version, is_alone=is_alone, key=key, notify=notify
    )
    say(
        f"{model}: delta {made.seq} of line {made.line} reverts to "
        f"{f'delta {to}' if to else 'the version'}. Servers that follow the line apply it at their "
        "next poll."
    )


def prune(store: str, model: str, keep_hours: float, is_trial: bool) -> None:
    """Removes deltas that no version needs and that are older than ``keep_hours``."""
    pruned = prune_deltas(store, model, keep_s=3600 * keep_hours, is_trial=is_trial)
    done = "would remove" if is_trial else "removed"
    for one in pruned:
        say(f"{model}: {done} deltas {one.first} to {one.last} of line {one.line}")
    if not pruned:
        say(
            f"{model}: {done} no deltas: versions need them, or they are younger than "
            f"{keep_hours:g} hours"
        )


def compact(
    store: str,
    model: str,
    version: str | None,
    seq: int | None,
    cache: Path | None,
    key: Path | None,
) -> None:
    """Publishes a version and the deltas after it, up to ``seq``, as the next version."""
    with table_progress() as progress, transfer_progress() as uploading:
        made = compact_deltas(
            store,
            model,
            version=version,
            seq=seq,
            cache=cache,
            key=key,
            progress=progress,
            upload_progress=uploading,
        )
    source = made.manifest.source
    say(
        f"published {model} version {made.version}: {human_bytes(made.manifest.nbytes)} with the "
        f"deltas of line {source['line']} up to {source['line_seq']}, in {made.where}"
    )


def _stored(line: DeltaLine, seqs: Sequence[int]) -> dict[int, DeltaManifest]:
    """Returns the deltas by seq, except those that were removed since they were listed."""
    deltas = {}
    for seq in seqs:
        with suppress(MissingFileError):
            deltas[seq], _ = line.manifest(seq)
    return deltas


def _undone(deltas: Mapping[int, DeltaManifest]) -> set[int]:
    """Returns those of ascending ``deltas`` whose rows are no longer in the state after the last.

    Whether a delta that is missing between them was an undo is not known; it counts as none.
    """
    seqs = [*deltas]
    if not seqs:
        return set()

    def stored_up_to(seq: int) -> DeltaManifest:
        return deltas[seqs[bisect_right(seqs, seq) - 1]]

    rest = {one.seq for one in deltas_in_state(seqs[-1], seqs[0] - 1, stored_up_to)}
    return {seq for seq, one in deltas.items() if one.reverts_to is None} - rest


def _counted(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number:,} {noun}s"


def _gap_cells(first: int, last: int) -> tuple[str, ...]:
    seqs = str(first) if first == last else f"{first} to {last}"
    return seqs, "missing", "", "", "", "", ""


def _cells(delta: DeltaManifest, *, is_undone: bool) -> tuple[str, ...]:
    step = "" if delta.step is None else str(delta.step)
    rows = f"{sum(delta.rows.values()):,}" + (" undone" if is_undone else "")
    if delta.reverts_to is not None:
        rows = f"to {delta.reverts_to}"
    nbytes = human_bytes(delta.nbytes)
    return str(delta.seq), delta.as_of, step, rows, nbytes, delta.writer, delta.token[:RUN_DIGITS]


def _show_delta(delta: DeltaManifest) -> None:
    step = "" if delta.step is None else f", after step {delta.step}"
    write(
        f"delta {delta.seq} of line {delta.line} of {delta.model}: rows as of {delta.as_of}{step}, "
        f"{human_bytes(delta.nbytes)} in {_counted(len(delta.files), 'file')}"
    )
    signed = "signed (deltas verify --key verifies it)" if delta.signature else "not signed"
    write(f"written by {delta.writer}, run {delta.token}, {signed}")
    if delta.reverts_to is not None:
        write(f"reverts to delta {delta.reverts_to}: {delta.why}")
        return
    if delta.goldens is not None:
        write(
            f"goldens: {delta.goldens.examples} examples with {len(delta.goldens.numbers):,} ids, "
            f"as training in {delta.goldens.dtype} answers them"
        )
    rows, ids = delta.rows, delta.ids
    columns = ("rows", "new ids", "removed ids") if ids else ("rows",)
    table = grid("table", *columns, numbers=columns)
    for name in dict.fromkeys((*rows, *ids)):
        counts = ids.get(name, IdCounts())
        cells = (rows.get(name, 0), counts.new, counts.removed)[: len(columns)]
        table.add_row(plain(name), *(f"{one:,}" for one in cells))
    if table.row_count:
        show("changes", table)
    else:
        write("changes: none")
