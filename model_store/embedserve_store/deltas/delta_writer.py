"""Appends deltas to the line of a published version, from the job that trains the model.

Every rank writes the files of its own rows. Rank 0 then writes the manifest, which makes the delta
visible. The manifest is created only where there is none, so the second of two writers is fenced
off. Imports torch when called.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from embedserve_store.deltas.append import append, check_no_overwrites, now
from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.deltas.encode_changes import Changes, encode_changes
from embedserve_store.deltas.golden_bags import (
    GoldenBags,
    bags_of,
    check_bags,
    delta_goldens,
    trained_answers,
    with_row_numbers,
)
from embedserve_store.deltas.ranks import Ranks
from embedserve_store.deltas.signing import KeyFile, SigningKey, check_stays_signed, signing_key
from embedserve_store.deltas.tracked_rows import TrackedRows
from embedserve_store.errors import (
    InvalidModelError,
    RevertedError,
    StoreError,
    WriterFencedError,
)
from embedserve_store.format.delta_file import ChangedRows, encode, repeated_row, split
from embedserve_store.format.delta_goldens import DTYPES, DeltaGoldens
from embedserve_store.format.delta_manifest import (
    DELTA_BYTES_MAX,
    FILES_MAX,
    FOLDER,
    DeltaFile,
    DeltaManifest,
    LinePosition,
    file_name,
    manifest_name,
)
from embedserve_store.format.text_limit import check_texts
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.parity import least_precise
from embedserve_store.ids.id_map import IdMap
from embedserve_store.model_store import ModelStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.added_file import user, writer
from embedserve_store.sources.live_dmp import describe_sharded

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Result = TypeVar("Result")


class DeltaWriter:
    """Appends rows that changed in training to the line of a version, one delta for each push.

        writer = DeltaWriter("s3://bucket/store", model="dlrm", module=dmp)
        for step, batch in enumerate(batches):
            train(batch)
            if step % 20 == 0:
                writer.push(step=step)
        writer.close()

    All ranks of the process group make the same calls in the same order. A delta holds the rows of
    all ranks, and appears whole or not at all. If a push fails, no delta appears, and the rows may
    be pushed again.

    Attributes:
        seq: last delta of the line that this writer knows; 0 if there is none.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        model: str,
        version: int | None = None,
        module: torch.nn.Module | None = None,
        prefix: str = "",
        overlap_steps: int = 1,
        is_alone: bool = False,
        key: KeyFile | None = None,
    ) -> None:
        """Finds the end of the line, and tracks ``module``; a collective before the first step.

        Args:
            store: a folder that all ranks see, or a URL.
            version: version that the deltas change. Default: the newest.
            module: the DistributedModelParallel that is trained, for ``push``. Its tables must be
                those of the version.
            prefix: selects the collection in ``module`` if there are several.
            overlap_steps: number of training steps whose rows are pushed once more, as many as the
                training pipeline looks up ahead of the optimizer.
            is_alone: whether no other writer can exist. Required where two writers could overwrite
                each other: in an object store without conditional writes, or a file system without
                hard links.
            key: PEM file with the Ed25519 private key that signs the deltas; rank 0 alone reads it.
                Default: the file that the variable EMBEDSERVE_DELTA_SIGNING_KEY names. Without
                either, deltas are not signed. Required after a signed delta.

        Raises:
            InvalidModelError: on all ranks: ``module`` has other tables than the version, or what
                it trains cannot be tracked (tracked_rows.py).
            StoreError: on all ranks: there is no such version, the end of its line is damaged, the
                store cannot be read or written, or the key cannot be used.
        """
        self._tracked: TrackedRows | None = None
        self._ranks = Ranks()
        self._models = ModelStore(store)
        self._is_fenced = False
        self._reverted: RevertedError | None = None
        self._opened: ModelVersion | None = None
        self._key: SigningKey | None = None
        self._token: str = self._ranks.from_first(secrets.token_hex(8))
        self._on_all(lambda: self._open(model, version))
        self._on_first(lambda: self._read_key(key))
        self._position = self._on_first(lambda: self._find_end(is_alone))
        self._module, self._prefix = module, prefix
        if module is not None:
            self._on_all(lambda: self._check_tables(module, prefix))
            self._tracked = TrackedRows(module, self._ranks, prefix, overlap_steps)

    @property
    def seq(self) -> int:
        return self._position.seq

    def push(self, *, step: int | None = None, goldens: GoldenBags | None = None) -> int:
        """Appends a delta with the rows that training touched since the last push; a collective.

        It is called between two steps, on the thread and CUDA stream that train. Rows are as they
        are after the optimizer. If it fails, the next push has these rows, too.

        Args:
            step: number of the training step, for people.
            goldens: bags of row numbers, for which the model's results go into the delta. Servers
                compare them before they apply the delta. Bags, or a KeyedJaggedTensor that has the
                version's features. Those of rank 0 count.

        Returns:
            The seq of the delta. A delta without rows is a sign of life.

        Raises:
            InvalidModelError: on all ranks: a row cannot be stored, an id was looked up that its
                table does not have, or the goldens exceed a limit or do not fit the version.
            RevertedError, WriterFencedError, StoreError: as in ``push_rows``.
            ValueError: the writer was made without ``module``.
        """
        if self._tracked is None:
            raise ValueError("push needs DeltaWriter(…, module=…); rows of your own: push_rows")
        self._check_continues()
        as_of = now()
        rows = self._tracked.take()
        encoded = self._on_all(lambda: encode_changes(rows, self._tables, {}))
        answered = self._answered(goldens)
        seq = self._append(encoded, answered, step, as_of)
        self._tracked.mark_taken()
        return seq

    def push_rows(
        self,
        changes: Changes,
        *,
        step: int | None = None,
        goldens: tuple[GoldenBags, Any] | None = None,
    ) -> int:
        """Appends a delta with the given rows, and returns its seq; a collective of all ranks.

        Args:
            changes: row numbers [n] and rows [n, dim] by table; rows are float32, float16 or
                bfloat16, on any device. For a table with a vocabulary (id rule map), ids of the
                vocabulary replace the row numbers. No row may occur twice, on one rank or on two.
                Without rows the delta is empty: a sign of life.
            step: number of the training step, for people.
            goldens: bags, and the results [B, sum of dims] that they have after the delta, in the
                order of the version's keys; without pooling [N, dim]. Ids are as in ``changes``.
                Those of rank 0 count. Servers compare them before they apply the delta.

        Raises:
            InvalidModelError: on all ranks: a table, id or row cannot be stored, or the goldens
                exceed a limit or do not fit the version.
            RevertedError: on all ranks: deltas were undone. Call ``resume``, or go back to a
                checkpoint and make a new writer.
            WriterFencedError: on all ranks: another writer has appended to the line.
            StoreError: on all ranks: the store cannot be written.
        """
        self._check_continues()
        as_of = now()
        encoded = self._on_all(lambda: self._encode(changes))
        self._check_apart(encoded)
        given = self._on_first(lambda: self._given(goldens))
        return self._append(encoded, given, step, as_of)

    def resume(self) -> None:
        """Continues after an undo; a collective of all ranks.

        The next ``push`` has the undone rows again, as they are in training then. If it is called
        again before that push, the next push has the rows of both undos. Rows that ``push_rows``
        pushed are pushed again by the caller.

        Raises:
            WriterFencedError: on all ranks: another writer has appended to the line.
            StoreError: on all ranks: the store cannot be read, or an undone delta is damaged, so
                that its rows are not known.
        """
        self._check_not_fenced()
        self._position, undone = self._on_first(self._pass_undos)
        self._reverted = None
        if self._tracked is not None:
            self._tracked.take_again(undone)

    def close(self) -> None:
        """Ends the writer and the tracking; a collective of all ranks."""
        if self._tracked is not None:
            self._tracked.close()
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._tracked is not None:  # the other ranks may never come to close their groups
            self._tracked.close()

    @property
    def _where(self) -> str:
        return f"{self._models.where}/{self._folder}"

    def _check_not_fenced(self) -> None:
        if self._is_fenced:
            raise WriterFencedError(f"{self._where}: this writer was fenced off and has stopped")

    def _check_continues(self) -> None:
        self._check_not_fenced()
        if self._reverted is not None:
            raise self._reverted

    def _check_tables(self, module: torch.nn.Module, prefix: str) -> None:
        """Raises InvalidModelError unless ``module`` has the tables of the version."""
        trained = {table.name: table for table in describe_sharded(module, prefix)[0]}
        for name in self._tables.keys() | trained.keys():
            stored, own = self._tables.get(name), trained.get(name)
            shapes = [
                f"[{one.num_embeddings}, {one.embedding_dim}]" if one else "missing"
                for one in (own, stored)
            ]
            if shapes[0] != shapes[1]:
                raise InvalidModelError(
                    f"table {name!r} is {shapes[0]} in training and {shapes[1]} in version "
                    f"{self._version} of {self._model!r}"
                )

    def _open(self, model: str, version: int | None) -> None:
        base = self._models.manifest(model, version)
        self._base = base
        self._model, self._version = base.model, base.version
        self._author = user()
        check_texts(writer=self._author)
        self._tables = {table.name: table for table in base.tables}
        self._line = DeltaLine(self._models, base)
        self._folder = f"{model}/{FOLDER}/{self._line.start.line}"
        self._write = writer(self._models.where, f"{model}/{FOLDER}")

    def _read_key(self, path: KeyFile | None) -> None:
        """Reads the key. Returns nothing: what rank 0 returns is sent to all ranks."""
        self._key = signing_key(path)

    def _find_end(self, is_alone: bool) -> LinePosition:
        if not is_alone:
            check_no_overwrites(self._models.where, self._folder)
        stored = self._line.seqs()
        if not stored:
            return self._line.start
        last, end = self._line.manifest(stored[-1])
        check_stays_signed(last, self._key)
        return end

    def _pass_undos(self) -> tuple[LinePosition, dict[str, NDArray[np.int64]]]:
        """Returns the end of the line, and the rows that the undos before it changed, by table.

        Deltas of this writer are passed over: earlier pushes, which failed because the store's
        response was lost.
        """
        end = self._position
        while (found := self._line.after(end)) is not None:
            self._check_own(found[0])
            end = found[1]
        if self._tracked is None:
            return end, {}
        return end, self._line.rows_between(self._position.seq, end.seq)

    def _encode(self, changes: Changes) -> dict[str, ChangedRows]:
        return encode_changes(changes, self._tables, self._id_maps(changes))

    def _id_maps(self, tables: Iterable[str]) -> Mapping[str, IdMap]:
        """Returns the vocabularies, if one of ``tables`` has one; a remote version is pulled."""
        rules = [self._tables[name].ids.rule for name in tables if name in self._tables]
        if "map" in rules and self._opened is None:
            self._opened = self._models.load(self._model, self._version)
        return self._opened.id_maps if self._opened else {}

    def _given(self, goldens: tuple[GoldenBags, Any] | None) -> DeltaGoldens | None:
        if goldens is None:
            return None
        bags, answers = goldens
        bags = with_row_numbers(bags_of(bags, self._base), self._base, self._id_maps(self._tables))
        return delta_goldens(bags, answers, DTYPES[0], self._base)

    def _answered(self, goldens: GoldenBags | None) -> DeltaGoldens | None:
        """Returns the goldens of rank 0 with the results of the model in training; a collective."""
        bags = self._on_first(lambda: self._bags(goldens))
        if bags is None:
            return None
        assert self._tracked is not None
        answers, exchanged = self._on_all(
            lambda: trained_answers(self._module, self._prefix, self._base, bags)
        )
        dtype = least_precise(exchanged, *self._ranks.from_all(self._tracked.dtype))
        return self._on_first(lambda: delta_goldens(bags, answers, dtype, self._base))

    def _bags(self, goldens: GoldenBags | None) -> Bags | None:
        if goldens is None:
            return None
        bags = bags_of(goldens, self._base)
        check_bags(bags, self._base)
        return bags

    def _check_apart(self, changes: Mapping[str, ChangedRows]) -> None:
        """Raises InvalidModelError on all ranks if two have the same row; a collective."""
        if self._ranks.count == 1:
            return
        ours = {name: change.numbers for name, change in changes.items()}
        every = self._ranks.from_all(ours)
        for name in self._tables:
            row = repeated_row(*(one[name] for one in every if name in one))
            if row is not None:
                raise InvalidModelError(f"table {name!r}: row {row} is pushed by two ranks")

    def _append(
        self,
        changes: Mapping[str, ChangedRows],
        goldens: DeltaGoldens | None,
        step: int | None,
        as_of: str,
    ) -> int:
        """Writes the delta and returns its seq; a collective."""
        is_appended = False
        while not is_appended:
            files = self._written(changes)
            self._position, is_appended = self._on_first(
                partial(self._append_manifest, files, goldens, step, as_of)
            )
        return self._position.seq

    def _written(self, changes: Mapping[str, ChangedRows]) -> tuple[DeltaFile, ...]:
        """Writes the files of this rank, and returns those of all ranks; a collective."""
        own = self._on_all(lambda: list(self._write_files(changes)))
        return tuple(file for files in self._ranks.from_all(own) for file in files)

    def _write_files(self, changes: Mapping[str, ChangedRows]) -> list[DeltaFile]:
        token = secrets.token_hex(8)
        files = []
        for number, part in enumerate(split(changes)):
            name = file_name(self._position.seq + 1, token, self._ranks.rank, number)
            file, data = encode(part, name)
            self._write(f"{self._folder}/{name}", data)  # its name is this push's alone
            files.append(file)
        return files

    def _append_manifest(
        self,
        files: tuple[DeltaFile, ...],
        goldens: DeltaGoldens | None,
        step: int | None,
        as_of: str,
    ) -> tuple[LinePosition, bool]:
        """Writes the manifest. Returns the end of the line, and whether it is the new delta.

        It is not if the store has an earlier delta of this writer there: a push that failed because
        the store's response was lost. The files must then be written for the next seq.

        Raises:
            RevertedError: deltas were undone.
            WriterFencedError: another writer has appended.
            StoreError: the delta exceeds a limit, or the store cannot be written.
        """
        delta = DeltaManifest(
            model=self._model,
            line=self._position.line,
            seq=self._position.seq + 1,
            previous=self._position.checksum,
            writer=self._author,
            token=self._token,
            step=step,
            as_of=as_of,
            files=files,
            goldens=goldens,
        )
        where = f"{self._where}/{manifest_name(delta.seq)}"
        if delta.nbytes > DELTA_BYTES_MAX or len(files) > FILES_MAX:
            raise InvalidModelError(
                f"{where}: {delta.nbytes} bytes in {len(files)} files, the limits are "
                f"{DELTA_BYTES_MAX} and {FILES_MAX}: push more often"
            )
        if self._key is not None:
            delta = self._key.sign(delta)
        if (position := append(self._write, delta)) is not None:
            return position, True
        there, position = self._line.manifest(delta.seq)
        if there.reverts_to is not None:
            raise RevertedError(
                f"{where}: {there.writer} has reverted the line to delta {there.reverts_to} at "
                f"{there.as_of}: {there.why}. Call resume() to push the undone rows again, or go "
                "back to a checkpoint and make a new writer",
                there.reverts_to,
            )
        self._check_own(there)
        return position, there.to_bytes() == delta.to_bytes()

    def _check_own(self, delta: DeltaManifest) -> None:
        """Raises WriterFencedError if ``delta`` has rows of another writer."""
        if delta.reverts_to is None and delta.token != self._token:
            raise WriterFencedError(
                f"{self._where}/{manifest_name(delta.seq)}: {delta.writer} wrote it, with rows as "
                f"of {delta.as_of}: this writer stops"
            )

    def _on_all(self, call: Callable[[], Result]) -> Result:
        """Calls ``call`` on every rank, and returns its result; a collective.

        If it raises on a rank, all ranks raise: their own error, else that of the first rank.
        """
        result, error = _outcome(call)
        errors = [one for one in self._ranks.from_all(error) if one is not None]
        return self._checked(result, error or next(iter(errors), None))

    def _on_first(self, call: Callable[[], Result]) -> Result:
        """Calls ``call`` on rank 0, and returns or raises its outcome on all; a collective."""
        outcome: tuple[Result | None, StoreError | None] = None, None
        if self._ranks.rank == 0:
            outcome = _outcome(call)
        outcome = self._ranks.from_first(outcome)
        return self._checked(*outcome)

    def _checked(self, result: Result | None, error: StoreError | None) -> Result:
        """Returns ``result``, or raises ``error``; a fenced writer stays fenced, and a reverted one
        reverted until ``resume``."""
        if error is not None:
            self._is_fenced = isinstance(error, WriterFencedError)
            if isinstance(error, RevertedError):
                self._reverted = error
            raise error
        return cast(Result, result)


def _outcome(call: Callable[[], Result]) -> tuple[Result | None, StoreError | None]:
    """Returns the result of ``call``, or its error, which other ranks can receive."""
    try:
        return call(), None
    except StoreError as error:
        return None, error
    except Exception as error:
        other = StoreError(f"{type(error).__name__}: {error}")
        other.__cause__ = error
        return None, other
