"""Appends deltas to the line of a published version, from the job that trains the model.

Imports torch when called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from embedserve_store.deltas.append import as_of_now
from embedserve_store.deltas.encode_changes import (
    Changes,
    copy_changes,
    copy_removed,
    encode_changes,
    hash_changes,
)
from embedserve_store.deltas.line_appender import LineAppender
from embedserve_store.deltas.notify.broker_url import Notify
from embedserve_store.deltas.notify.make_notifier import make_notifier
from embedserve_store.deltas.push_runner import PushRunner, evaluate
from embedserve_store.deltas.pushed_goldens import GoldenBags, PushedGoldens
from embedserve_store.deltas.pushed_ids import AssignedIds, PushedIds, RemovedIds
from embedserve_store.deltas.signing import KeyFile
from embedserve_store.deltas.tracked_rows import TakenRows, TrackedRows, check_same_tables
from embedserve_store.errors import InvalidModelError, RevertedError, StoreError
from embedserve_store.format.changed_ids import ChangedIds
from embedserve_store.format.delta_file import ChangedRows, repeated_row
from embedserve_store.format.delta_goldens import DeltaGoldens
from embedserve_store.publishing.ranks import Ranks

if TYPE_CHECKING:
    import torch

    from embedserve_store.deltas.notify.notifier import DeltaNotifier


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
    be pushed again. A push that exceeds the limits of a delta, 4 GiB or 10,000 files, appends
    several. The last has the ids and goldens; if it fails, those before may have appeared.

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
        notify: Notify | None = None,
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
            notify: URL of the broker over which servers are notified of each delta, or a file with
                the URL; rank 0 alone uses it. Default: the variable EMBEDSERVE_DELTA_NOTIFY. A
                broker that fails delays no push.

        Raises:
            InvalidModelError: on all ranks: ``module`` has other tables than the version, or what
                it trains cannot be tracked (tracked_rows.py).
            StoreError: on all ranks: there is no such version, the end of its line is damaged, the
                store cannot be read or written, or the key or ``notify`` cannot be used.
        """
        self._is_closed = False
        self._tracked: TrackedRows | None = None
        self._notifier: DeltaNotifier | None = None
        self._pushes = PushRunner()
        self._module, self._prefix = module, prefix
        ranks = self._ranks = Ranks()
        try:
            self._line = LineAppender(store, model, version, ranks, is_alone=is_alone, key=key)
            self._tables = {table.name: table for table in self._line.base.tables}
            self._ids = PushedIds(self._line, ranks)
            self._goldens = PushedGoldens(self._line.base, ranks)
            ranks.on_first(lambda: self._make_notifier(notify))
            if module is not None:
                ranks.on_all(lambda: check_same_tables(module, prefix, self._line.base))
                self._tracked = TrackedRows(module, ranks, prefix, overlap_steps)
        except Exception:
            self.close()
            raise

    @property
    def seq(self) -> int:
        return self._line.position.seq

    @overload
    def push(
        self,
        *,
        step: int | None = None,
        goldens: GoldenBags | None = None,
        vocabulary: AssignedIds | None = None,
        removed: RemovedIds | None = None,
        wait: Literal[True] = True,
    ) -> int: ...
    @overload
    def push(
        self,
        *,
        step: int | None = None,
        goldens: GoldenBags | None = None,
        vocabulary: AssignedIds | None = None,
        removed: RemovedIds | None = None,
        wait: Literal[False],
    ) -> Future[int]: ...

    def push(
        self,
        *,
        step: int | None = None,
        goldens: GoldenBags | None = None,
        vocabulary: AssignedIds | None = None,
        removed: RemovedIds | None = None,
        wait: bool = True,
    ) -> int | Future[int]:
        """Appends a delta with the rows that training touched since the last push; a collective.

        It is called between two steps, on the thread and CUDA stream that train. Rows are as they
        are after the optimizer. If it fails, the next push has these rows, too, as they are then.
        It has the ids again, too, unless they made it fail or the next push names them itself.

        Args:
            step: number of the training step, for people.
            goldens: bags of row numbers, for which the model's results go into the delta. Servers
                compare them before they apply the delta. Bags, or a KeyedJaggedTensor that has the
                version's features. Those of rank 0 count. Results are looked up in the caller.
            vocabulary: for tables with a vocabulary (id rule map), ids that are new, or have moved
                to another row, and the row of each [n] in training. Each rank names its own.
            removed: ids [n] by table that have no row any more. Their rows stay as they are.
            wait: whether to return after the delta is written. False: copies the rows, and writes
                the delta in a thread while training continues. The next ``push``, ``push_rows``,
                ``wait``, ``resume`` or ``close`` waits for it, and raises its error once, on all
                ranks. After such an error this call has not pushed.

        Returns:
            The seq of the delta. A delta without rows is a heartbeat. With ``wait=False`` a
            future of it. Its ``result`` waits on this rank alone, and raises what all ranks raise;
            the error counts as raised only once one of the calls above has raised it.

        Raises:
            InvalidModelError: on all ranks: a row cannot be stored, or the goldens exceed a limit
                or do not fit the version. Or an id is named twice, has a row outside its table, or
                is removed without being there.
            RevertedError, WriterFencedError, StoreError: as in ``push_rows``. StoreError also if a
                rank cannot copy its rows.
            ValueError: the writer is closed, or was made without ``module``.
        """
        if self._tracked is None or self._module is None:
            raise ValueError("push needs DeltaWriter(…, module=…); rows of your own: push_rows")
        tracked = self._tracked
        own_ids = evaluate(lambda: (copy_changes(vocabulary or {}), copy_removed(removed)))
        try:
            self._begin()
            as_of = as_of_now()
            made_goldens = self._goldens.look_up(goldens, self._module, self._prefix, tracked.dtype)
        except StoreError:
            with suppress(StoreError):  # of ids that cannot be; the reason of the failure matters
                self._ids.keep(own_ids)
            self._keep_rows(tracked)
            raise
        taken = tracked.take()

        def write() -> int:
            ids = self._ids.assigned_changes(own_ids)  # first: it keeps them if anything else fails
            rows = tracked.whole_rows(taken)
            encoded = self._ranks.on_all(lambda: encode_changes(rows, self._tables, {}))
            return self._append(encoded, ids, made_goldens, step, as_of)

        run = self._pushes.run if wait else self._pushes.start
        return run(write, lambda: self._keep_rows(tracked, taken))

    @overload
    def push_rows(
        self,
        changes: Changes,
        *,
        step: int | None = None,
        goldens: tuple[GoldenBags, Any] | None = None,
        removed: RemovedIds | None = None,
        wait: Literal[True] = True,
    ) -> int: ...
    @overload
    def push_rows(
        self,
        changes: Changes,
        *,
        step: int | None = None,
        goldens: tuple[GoldenBags, Any] | None = None,
        removed: RemovedIds | None = None,
        wait: Literal[False],
    ) -> Future[int]: ...

    def push_rows(
        self,
        changes: Changes,
        *,
        step: int | None = None,
        goldens: tuple[GoldenBags, Any] | None = None,
        removed: RemovedIds | None = None,
        wait: bool = True,
    ) -> int | Future[int]:
        """Appends a delta with the given rows, and returns its seq; a collective of all ranks.

        If it fails, the caller pushes the rows again.

        Args:
            changes: row numbers [n] and rows [n, dim] by table; rows are float32, float16 or
                bfloat16, on any device. For a table with a vocabulary (id rule map), ids replace
                the row numbers. A new id gets a row of the table that no id has. No row may occur
                twice, on one rank or on two. Without rows the delta is empty: a heartbeat.
            step: number of the training step, for people.
            goldens: bags, and the results [B, sum of dims] that they have after the delta, in the
                order of the version's keys; without pooling [N, dim]. Ids are as in ``changes``.
                Those of rank 0 count. Servers compare them before they apply the delta.
            removed: ids [n] by table that have no row any more. New ids get their rows later.
            wait: as in ``push``. With False, the arguments are copied.

        Raises:
            InvalidModelError: on all ranks: a table, id or row cannot be stored, there is no row
                left for a new id, or the goldens exceed a limit or do not fit the version.
            RevertedError: on all ranks: deltas were undone. Call ``resume``, or go back to a
                checkpoint and make a new writer.
            WriterFencedError: on all ranks: another writer has appended to the line.
            StoreError: on all ranks: the store cannot be written.
            ValueError: the writer is closed.
        """
        self._begin()
        as_of = as_of_now()
        own_changes = evaluate(lambda: changes if wait else copy_changes(changes))
        own_goldens = evaluate(lambda: goldens if wait else self._goldens.copy(goldens))
        own_removed = evaluate(lambda: copy_removed(removed))

        def write() -> int:
            hashed = self._ranks.on_all(lambda: hash_changes(own_changes(), self._tables))
            ids = self._ids.row_changes(hashed, own_removed)
            rows_of = self._ids.rows_after(ids)
            encoded = self._ranks.on_all(lambda: encode_changes(hashed, self._tables, rows_of))
            self._check_distinct_rows(encoded)
            given = self._goldens.encode(own_goldens, rows_of)
            return self._append(encoded, ids, given, step, as_of)

        run = self._pushes.run if wait else self._pushes.start
        return run(write, lambda: None)

    def wait(self) -> None:
        """Waits until the push in flight is written, if there is one; a collective of all ranks.

        Raises:
            StoreError: on all ranks: the push failed, with the errors of ``push``.
        """
        self._pushes.join()

    def resume(self) -> None:
        """Continues after an undo; a collective of all ranks.

        The next ``push`` has the undone rows again, as they are in training then, and the undone
        changes of ids. If it is called again before that push, the next push has the rows of both
        undos. What ``push_rows`` pushed is pushed again by the caller. A push in flight that fails
        because of the undo raises nothing.

        Raises:
            WriterFencedError: on all ranks: another writer has appended to the line.
            StoreError: on all ranks: the store cannot be read, or an undone delta is damaged, so
                that its rows are not known. Or the push in flight failed.
            ValueError: the writer is closed.
        """
        self._check_open()
        with suppress(RevertedError):
            self.wait()
        rows, ids = self._line.advance_past_undos(is_tracked=self._tracked is not None)
        self._ids.take_again(ids)
        if self._tracked is not None:
            self._tracked.take_again(rows)

    def close(self) -> None:
        """Ends the writer and the tracking; a collective of all ranks.

        Raises:
            StoreError: on all ranks: the push in flight failed; the writer is closed.
        """
        try:
            self.wait()
        finally:
            self._is_closed = True
            if self._tracked is not None:
                self._tracked.close()
            if self._notifier is not None:
                self._notifier.close()
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
            return
        self._is_closed = True
        self._pushes.leave()  # the other ranks may never come to join it, or to close their groups
        if self._tracked is not None:
            self._tracked.close()

    def _make_notifier(self, notify: Notify | None) -> None:
        """Makes the notifier. Returns nothing: what rank 0 returns is sent to all ranks."""
        line = self._line
        self._notifier = make_notifier(notify, line.base.model, line.position.line)

    def _begin(self) -> None:
        """Waits for the push in flight, and raises the error that stops this writer."""
        self._check_open()
        self.wait()
        self._line.check_continues()

    def _check_open(self) -> None:
        """Raises ValueError after ``close``, when no rank can reach the others any more."""
        if self._is_closed:
            raise ValueError("the DeltaWriter is closed: make another to push")

    def _keep_rows(self, tracked: TrackedRows, taken: TakenRows | None = None) -> None:
        """Keeps the rows of a push that failed for the next one, if there can be one.

        Args:
            taken: rows that it had taken. None: it has taken none, but touched ids must not
                accumulate on the device while pushes fail.
        """
        if self._line.is_fenced:
            tracked.close()
        elif taken is None:
            tracked.set_aside()
        else:
            tracked.take_again(taken.numbers)

    def _append(
        self,
        changes: Mapping[str, ChangedRows],
        ids: Mapping[str, ChangedIds],
        goldens: DeltaGoldens | None,
        step: int | None,
        as_of: str,
    ) -> int:
        """Writes a delta, notifies servers of it, and returns its seq; a collective."""
        seq = self._line.append(changes, ids, goldens, step, as_of)
        self._ids.advance(ids)
        if self._notifier is not None:
            self._notifier.notify(seq)
        return seq

    def _check_distinct_rows(self, changes: Mapping[str, ChangedRows]) -> None:
        """Raises InvalidModelError on all ranks if two have the same row; a collective."""
        if self._ranks.count == 1:
            return
        ours = {name: change.numbers for name, change in changes.items()}
        every = self._ranks.from_all(ours)
        for name in self._tables:
            row = repeated_row(*(one[name] for one in every if name in one))
            if row is not None:
                raise InvalidModelError(f"table {name!r}: row {row} is pushed by two ranks")
