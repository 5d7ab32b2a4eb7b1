"""Appends deltas to the line of a published version, as a collective of all ranks.

Every rank writes the files of its own rows. Rank 0 then writes the manifest, which makes the delta
visible. The manifest is created only where there is none, so the second of two writers is fenced
off. A push that exceeds the limits of a delta is appended as several. Imports torch when called.
"""

from __future__ import annotations

import operator
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from embedserve_store.deltas.append import append, check_no_overwrites
from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.deltas.signing import KeyFile, SigningKey, check_stays_signed, signing_key
from embedserve_store.errors import (
    InvalidModelError,
    RevertedError,
    UnreachableError,
    WriterFencedError,
)
from embedserve_store.format.changed_ids import (
    ChangedIds,
    compose_ids,
    encode_ids,
    encoded_id_bytes,
    split_ids,
)
from embedserve_store.format.delta_file import ChangedRows, encode, encoded_bytes, split
from embedserve_store.format.delta_goldens import DeltaGoldens
from embedserve_store.format.delta_manifest import (
    DELTA_BYTES_MAX,
    DELTAS_FOLDER,
    FILES_MAX,
    DeltaFile,
    DeltaManifest,
    LinePosition,
    delta_file_name,
    manifest_name,
)
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.text_limit import check_texts
from embedserve_store.ids.id_map import IdMap
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.added_file import user, writer
from embedserve_store.publishing.ranks import Ranks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EncodeFile = Callable[[str], tuple[DeltaFile, bytes]]
"""Encodes a file of a delta. The argument is its name."""


UndoneChanges = tuple[Mapping[str, "NDArray[np.int64]"], Mapping[str, ChangedIds]]
"""Changes that undos took back, by table: row numbers [n], and ids with the rows that they had
before the undo."""


class LineAppender:
    """The end of a line, after which the ranks of one training job append deltas.

    Attributes:
        models: the store.
        base: manifest of the version that the deltas change.
        position: end of the line, as far as this job knows.
        is_fenced: whether another writer has appended to the line, so that this job appends no
            more.
        write: writes a new file into the store.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        model: str,
        version: int | None,
        ranks: Ranks,
        *,
        is_alone: bool,
        key: KeyFile | None,
    ) -> None:
        """Finds the end of the line; a collective. The arguments and errors are DeltaWriter's."""
        self.models = ModelStore(store)
        self._ranks = ranks
        self.is_fenced = False
        self._may_have_unseen_delta = False  # of this job, in the store after ``position``
        # Its arguments alone: the error would keep the frames of each push that raised it.
        self._reverted: tuple[Any, ...] | None = None
        self._key: SigningKey | None = None
        self._token: str = ranks.from_first(secrets.token_hex(8))
        self._ranks.on_all(lambda: self._open(model, version))
        self._ranks.on_first(lambda: self._read_key(key))
        self.position = self._ranks.on_first(lambda: self._find_end(is_alone))

    def append(
        self,
        changes: Mapping[str, ChangedRows],
        ids: Mapping[str, ChangedIds],
        goldens: DeltaGoldens | None,
        step: int | None,
        as_of: str,
    ) -> int:
        """Writes a delta and returns its seq; a collective.

        If rows and ids exceed the limits of a delta, several are written, one after the other. The
        last one has the ids and the goldens; its seq is returned.

        Args:
            changes: rows of this rank, by table.
            ids: changed ids of all ranks, by table; rank 0 writes them.

        Raises:
            RevertedError, WriterFencedError, InvalidModelError, StoreError: as DeltaWriter.push.
        """
        self.advance_past_own()
        number = self._ranks.on_first(lambda: _step_number(step))
        file_rows = [*split(changes)]
        sizes = self._ranks.from_all([encoded_bytes(rows) for rows in file_rows])
        file_ids = [*split_ids([*ids.values()])]
        counts = _file_counts(sizes, [encoded_id_bytes(one) for one in file_ids])
        files: list[EncodeFile] = [partial(encode, rows) for rows in file_rows]
        make_manifest = partial(
            DeltaManifest,
            model=self.base.model,
            line=self.position.line,
            writer=self._author,
            token=self._token,
            step=number,
            as_of=as_of,
        )
        for count in counts[:-1]:
            own = count[self._ranks.rank]
            self._append_one(files[:own], make_manifest)
            files = files[own:]
        if self._ranks.rank == 0:
            files += [partial(encode_ids, one) for one in file_ids]
        self._append_one(files, partial(make_manifest, goldens=goldens))
        return self.position.seq

    def _append_one(
        self, own_files: Sequence[EncodeFile], make_manifest: Callable[..., DeltaManifest]
    ) -> None:
        """Writes one delta; a collective."""
        seq, previous = self.position.seq + 1, self.position.checksum
        delta = make_manifest(seq=seq, previous=previous, files=self._written(own_files))
        self._may_have_unseen_delta = True  # if the store's response is lost
        try:
            self.position = self._ranks.on_first(lambda: self._append_manifest(delta))
        except WriterFencedError:
            self.is_fenced = True
            raise
        except RevertedError as error:
            self._reverted = error.args
            raise
        self._may_have_unseen_delta = False

    def advance_past_own(self) -> dict[str, ChangedIds]:
        """Continues after deltas of this job that were written although their push failed, because
        the store's response was lost; a collective.

        Returns:
            The ids that they changed, by table.

        Raises:
            StoreError: on all ranks: the store cannot be read.
        """
        if not self._may_have_unseen_delta:
            return {}
        self.position, ids = self._ranks.on_first(self._find_own)
        self._may_have_unseen_delta = False
        return ids

    def check_continues(self) -> None:
        """Raises the error that has stopped this job: it is fenced off, or deltas were undone."""
        self._check_not_fenced()
        if self._reverted is not None:
            raise RevertedError(*self._reverted)

    def changed_ids(self) -> dict[str, ChangedIds]:
        """Returns the ids that all deltas of the line have changed, by table. Reads the manifests
        of all deltas after the version. Raises StoreError if one is damaged."""
        return self._line.ids_at(self.position.seq)

    def id_maps(self) -> Mapping[str, IdMap]:
        """Returns the version's vocabularies by table; a remote version is pulled."""
        return self.models.load(self.base.model, self.base.version).id_maps

    def advance_past_undos(self, *, is_tracked: bool) -> UndoneChanges:
        """Continues after the undos at the end of the line; a collective.

        Args:
            is_tracked: whether the changes that they undid are of interest.

        Returns:
            These changes.

        Raises:
            WriterFencedError, StoreError: as DeltaWriter.resume.
        """
        self._check_not_fenced()
        try:
            self.position, undone = self._ranks.on_first(lambda: self._find_undone(is_tracked))
        except WriterFencedError:
            self.is_fenced = True
            raise
        self._reverted, self._may_have_unseen_delta = None, False
        return undone

    @property
    def _where(self) -> str:
        return f"{self.models.where}/{self._folder}"

    def _check_not_fenced(self) -> None:
        if self.is_fenced:
            raise WriterFencedError(f"{self._where}: this writer was fenced off and has stopped")

    def _open(self, model: str, version: int | None) -> None:
        self.base: Manifest = self.models.manifest(model, version)
        self._author = user()
        check_texts(writer=self._author)
        self._line = DeltaLine(self.models, self.base)
        self._folder = f"{model}/{DELTAS_FOLDER}/{self._line.start.line}"
        self.write = writer(self.models.where, f"{model}/{DELTAS_FOLDER}")

    def _read_key(self, path: KeyFile | None) -> None:
        """Reads the key. Returns nothing: what rank 0 returns is sent to all ranks."""
        self._key = signing_key(path)

    def _find_end(self, is_alone: bool) -> LinePosition:
        if not is_alone:
            check_no_overwrites(self.models.where, self._folder)
        stored = self._line.seqs()
        if not stored:
            return self._line.start
        last, end = self._line.manifest(stored[-1])
        check_stays_signed(last, self._key)
        return end

    def _find_own(self) -> tuple[LinePosition, dict[str, ChangedIds]]:
        """Returns the position after the deltas of this job, and the ids that they changed."""
        end, passed = self.position, []
        while (found := self._line.after(end)) is not None and self._is_own(found[0]):
            passed.append(found[0])
            end = found[1]
        return end, compose_ids(self._line.ids(delta) for delta in passed)

    def _find_undone(self, is_tracked: bool) -> tuple[LinePosition, UndoneChanges]:
        """Returns the end of the line, and what the undos before it changed.

        Deltas of this writer are passed over: earlier pushes, which failed because the store's
        response was lost.
        """
        end = self.position
        while (found := self._line.after(end)) is not None:
            self._check_own(found[0])
            end = found[1]
        if not is_tracked:
            return end, ({}, {})
        before = self.position.seq
        rows = self._line.rows_between(before, end.seq)
        return end, (rows, self._line.ids_between(end.seq, before))

    def _written(self, own_files: Sequence[EncodeFile]) -> tuple[DeltaFile, ...]:
        """Writes the files of this rank, and returns those of all ranks; a collective."""
        own = self._ranks.on_all(lambda: self._write_files(own_files))
        return tuple(file for files in self._ranks.from_all(own) for file in files)

    def _write_files(self, own_files: Sequence[EncodeFile]) -> list[DeltaFile]:
        token = secrets.token_hex(8)
        files = []
        for number, encode_file in enumerate(own_files):
            name = delta_file_name(self.position.seq + 1, token, self._ranks.rank, number)
            file, data = encode_file(name)
            self.write(f"{self._folder}/{name}", data)  # its name is this push's alone
            files.append(file)
        return files

    def _append_manifest(self, delta: DeltaManifest) -> LinePosition:
        """Writes the manifest, and returns the position after the delta.

        Raises:
            RevertedError: deltas were undone.
            WriterFencedError: another writer has appended.
            UnreachableError: an earlier delta of this writer arrived only now. The ids of this one
                were chosen without it.
            StoreError: the delta exceeds a limit, or the store cannot be written.
        """
        where = f"{self._where}/{manifest_name(delta.seq)}"
        if self._key is not None:
            delta = self._key.sign(delta)
        if (position := append(self.write, delta)) is not None:
            return position
        there, position = self._line.manifest(delta.seq)
        if there.reverts_to is not None:
            raise RevertedError(
                f"{where}: {there.writer} has reverted the line to delta {there.reverts_to} at "
                f"{there.as_of}: {there.why}. Call resume() to push the undone rows again, or go "
                "back to a checkpoint and make a new writer",
                there.reverts_to,
            )
        self._check_own(there)
        if there.to_bytes() != delta.to_bytes():
            raise UnreachableError(
                f"{where}: an earlier push of this writer, whose response was lost, has arrived "
                "meanwhile: push again"
            )
        return position

    def _is_own(self, delta: DeltaManifest) -> bool:
        return delta.reverts_to is None and delta.token == self._token

    def _check_own(self, delta: DeltaManifest) -> None:
        """Raises WriterFencedError if ``delta`` has rows of another writer."""
        if delta.reverts_to is None and delta.token != self._token:
            raise WriterFencedError(
                f"{self._where}/{manifest_name(delta.seq)}: {delta.writer} wrote it, with rows as "
                f"of {delta.as_of}: this writer stops"
            )


def _step_number(step: Any) -> int | None:
    """Returns an integer of any type as int. Raises InvalidModelError for other values, which no
    reader of the delta accepts."""
    try:
        return None if step is None else int(operator.index(step))
    except TypeError as error:
        raise InvalidModelError(f"step is {step!r:.80}, expected an integer") from error


def _file_counts(sizes: Sequence[Sequence[int]], id_sizes: Sequence[int]) -> list[list[int]]:
    """Divides the files of a push among as few deltas as their limits allow.

    Args:
        sizes: bytes of the files of rows, of each rank.
        id_sizes: bytes of the files of ids, which are all in the last delta.

    Returns:
        The number of files of rows that each rank writes, for each delta.

    Raises:
        InvalidModelError: the ids alone exceed the limit of bytes.
    """
    id_bytes = sum(id_sizes)
    if id_bytes > DELTA_BYTES_MAX:  # far fewer than FILES_MAX files, of 32 MiB each
        raise InvalidModelError(
            f"the changed ids of a push are {id_bytes} bytes, the limit is {DELTA_BYTES_MAX}: push "
            "more often"
        )
    counts, nbytes = [[0] * len(sizes)], 0
    # A file of each rank in turn, so that all ranks write at the same time.
    turns = zip_longest(*([(rank, size) for size in own] for rank, own in enumerate(sizes)))
    for rank, size in (one for turn in turns for one in turn if one is not None):
        if nbytes + size > DELTA_BYTES_MAX or sum(counts[-1]) == FILES_MAX:
            counts.append([0] * len(sizes))
            nbytes = 0
        counts[-1][rank] += 1
        nbytes += size
    if nbytes + id_bytes > DELTA_BYTES_MAX or sum(counts[-1]) + len(id_sizes) > FILES_MAX:
        counts.append([0] * len(sizes))
    return counts
