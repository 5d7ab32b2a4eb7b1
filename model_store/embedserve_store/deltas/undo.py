"""Takes deltas back, by a further delta that reverts to the state before them. Imports no torch."""

from __future__ import annotations

import os
import secrets
from functools import partial

from embedserve_store.deltas.append import append, as_of_now, check_no_overwrites
from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.deltas.notify.broker_url import Notify
from embedserve_store.deltas.notify.make_notifier import make_notifier
from embedserve_store.deltas.signing import KeyFile, check_stays_signed, signing_key
from embedserve_store.errors import StoreError
from embedserve_store.format.delta_manifest import (
    DELTAS_FOLDER,
    DeltaManifest,
    LinePosition,
    position_of,
)
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.text_limit import check_texts
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.added_file import user, writer
from embedserve_store.publishing.record_event import record_event


def undo_deltas(
    store: str | os.PathLike[str],
    model: str,
    *,
    to: int,
    why: str,
    version: int | str | None = None,
    is_alone: bool = False,
    key: KeyFile | None = None,
    notify: Notify | None = None,
) -> DeltaManifest:
    """Appends a delta that brings the rows after delta ``to`` back.

    All servers that follow the line apply it, as do those that start later. It also takes back the
    deltas that a training job appends while it is written. The training job's next push raises
    RevertedError. The undone deltas stay in the store, so an undo can itself be undone.

    Args:
        store: a folder or a URL.
        to: seq of the delta to revert to; 0 for the version at which the line begins. A version
            that was compacted begins at a later seq, which is then the smallest.
        why: reason, for people; at most TEXT_MAX characters.
        version: version or alias whose line is meant. Default: the newest, if no alias names a
            version of another line.
        is_alone: whether no training job appends to the line. Required as in DeltaWriter.
        key: file of the private key, as in DeltaWriter.
        notify: broker over which servers are notified, as in DeltaWriter. If it fails, they find
            the undo by polling.

    Raises:
        StoreError: there is no such version or delta, ``version`` is left out where aliases name
            other lines, there is nothing to undo, the key or ``notify`` cannot be used, or a text
            is too long. Nothing has changed then.
        UnreachableError: the store cannot be read or written. The undo is in the store only if its
            response was lost.
    """
    author = user()
    check_texts(why=why, writer=author)
    signing = signing_key(key)
    models = ModelStore(store)
    line = _line_meant(models, model, version)
    notifier = make_notifier(notify, model, line)
    if not is_alone:
        check_no_overwrites(models.where, f"{model}/{DELTAS_FOLDER}/{line}")
    write = writer(models.where, f"{model}/{DELTAS_FOLDER}")
    make_manifest = partial(
        DeltaManifest,
        model=model,
        writer=author,
        token=secrets.token_hex(8),
        step=None,
        files=(),
        reverts_to=to,
        why=why,
    )
    while True:  # again after a delta that a training job has appended meanwhile
        base, newest, end = _checked_end(models, model, version, to)
        check_stays_signed(newest, signing)
        undo = make_manifest(
            line=end.line, seq=end.seq + 1, previous=end.checksum, as_of=as_of_now()
        )
        if signing is not None:
            undo = signing.sign(undo)
        if append(write, undo) is not None or _is_there(DeltaLine(models, base), undo):
            break
    if notifier is not None:
        notifier.notify(undo.seq)
        notifier.close()
    detail = f"line {undo.line}, delta {undo.seq} reverts to {to}: {why}"
    record_event(models.where, "undo", model, (base.version,), detail=detail)
    return undo


def _line_meant(models: ModelStore, model: str, version: int | str | None) -> int:
    """Returns the line of the version, by default of the newest.

    Raises:
        StoreError: ``version`` is left out, and an alias names a version of another line: its
            servers would not apply the undo.
    """
    line = position_of(models.manifest(model, version)).line
    if version is not None:
        return line
    aliases = {name: alias.version for name, alias in models.aliases(model).items()}
    lines = {one: position_of(models.manifest(model, one)).line for one in {*aliases.values()}}
    others = [
        f"{name} names version {number} of line {lines[number]}"
        for name, number in aliases.items()
        if lines[number] != line
    ]
    if others:
        raise StoreError(
            f"{model}: the newest version is of line {line}, but {', '.join(others)}. Name "
            "the version or alias whose line is meant (--version)"
        )
    return line


def _checked_end(
    models: ModelStore, model: str, version: int | str | None, to: int
) -> tuple[Manifest, DeltaManifest, LinePosition]:
    """Returns the version, its last delta and the end of its line, if the line can be reverted to
    delta ``to``.

    A long line takes many requests to list. Whether a delta was appended or the version replaced
    since is therefore checked again at last, with few requests. A store without conditional writes
    would replace such a delta.

    Raises:
        StoreError: the line cannot be reverted to ``to``.
    """
    while True:
        base = models.manifest(model, version)
        line = DeltaLine(models, base)
        stored = line.seqs()
        last = stored[-1] if stored else line.start.seq
        if not line.start.seq <= to < last:
            raise StoreError(_out_of_range(line, base.version, to, last))
        newest, end = line.manifest(last)
        if models.resolve(model, version) == base.version and line.after(end) is None:
            return base, newest, end


def _is_there(line: DeltaLine, undo: DeltaManifest) -> bool:
    """Returns whether the store has ``undo``, although the response said that it had another."""
    return line.manifest(undo.seq)[0].token == undo.token


def _out_of_range(line: DeltaLine, version: int, to: int, last: int) -> str:
    start = line.start
    if last == start.seq:
        return f"line {start.line} has no delta after version {version}: nothing to undo"
    message = f"delta {to}: expected {start.seq} to {last - 1}; line {start.line} ends with {last}"
    if to < start.seq:
        message += (
            f". Version {version} has the deltas up to {start.seq} in its rows, so {start.seq} is "
            "the earliest that it can go back to"
        )
    return message
