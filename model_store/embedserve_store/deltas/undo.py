"""Takes deltas back, by a further delta that reverts to the state before them. Imports no torch."""

from __future__ import annotations

import os
import secrets

from embedserve_store.deltas.append import append, check_no_overwrites, now
from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.deltas.signing import KeyFile, check_stays_signed, signing_key
from embedserve_store.errors import StoreError
from embedserve_store.format.delta_manifest import FOLDER, DeltaManifest
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.added_file import check_texts, user, writer
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
) -> DeltaManifest:
    """Appends a delta that brings the rows after delta ``to`` back.

    All servers that follow the line apply it, as do those that start later. It also takes back the
    deltas that a training job appends while it is written. The training job's next push raises
    RevertedError. The undone deltas stay in the store, so an undo can itself be undone.

    Args:
        store: a folder or a URL.
        to: seq of the delta to revert to; 0 for the version at which the line begins.
        why: reason, for people; at most TEXT_MAX characters.
        version: version or alias whose line is meant. Default: the newest.
        is_alone: whether no training job appends to the line. Required as in DeltaWriter.
        key: file of the private key, as in DeltaWriter.

    Raises:
        StoreError: there is no such version or delta, there is nothing to undo, the key cannot be
            used, or the store cannot be read or written. Nothing has changed then.
    """
    check_texts(why=why)
    signing = signing_key(key)
    models = ModelStore(store)
    base = models.manifest(model, version)
    line = DeltaLine(models, base)
    if not is_alone:
        check_no_overwrites(models.where, f"{model}/{FOLDER}/{line.start.line}")
    write = writer(models.where, f"{model}/{FOLDER}")
    while True:
        stored = line.seqs()
        last = stored[-1] if stored else line.start.seq
        if not line.start.seq <= to < last:
            raise StoreError(_out_of_range(line, base.version, to, last))
        newest, position = line.manifest(last)
        check_stays_signed(newest, signing)
        undo = DeltaManifest(
            model=model,
            line=line.start.line,
            seq=last + 1,
            previous=position.checksum,
            writer=user(),
            token=secrets.token_hex(8),
            step=None,
            as_of=now(),
            files=(),
            reverts_to=to,
            why=why,
        )
        if signing is not None:
            undo = signing.sign(undo)
        if append(write, undo) is not None:
            break  # else a training job has appended a delta since
    detail = f"line {undo.line}, delta {undo.seq} reverts to {to}: {why}"
    record_event(models.where, "undo", model, (base.version,), detail=detail)
    return undo


def _out_of_range(line: DeltaLine, version: int, to: int, last: int) -> str:
    start = line.start
    if last == start.seq:
        return f"line {start.line} has no delta after version {version}: nothing to undo"
    message = f"delta {to}: expected {start.seq} to {last - 1}; line {start.line} ends with {last}"
    if to < start.seq:
        message += f", and version {version} has the deltas up to {start.seq}"
    return message
