"""Tests of lookups by ids that deltas add and remove, and of an alias bound to earlier deltas.

Each batch has the ids and rows of the delta that its seq names, on each device.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled_once import CompiledOnce
from engine.live_stores import GPU
from pooled import collection
from running_servers import Running, running
from torchrec import PoolingType

from embedserve.batching.join import join
from embedserve.deltas.applier_process import PROCESS_NAME
from embedserve.deltas.bounded_line import BoundedLine
from embedserve.deltas.follower import DeltaFollower
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import BatchView, RowsReader
from embedserve.deltas.status import FOLLOWING, SharedDeltaState
from embedserve.lookup_types import LookupRequest
from embedserve.model_info import ModelInfo
from embedserve_store import (
    DeltaWriter,
    IdRule,
    ModelStore,
    RevertedError,
    publish,
    set_alias,
    undo_deltas,
)
from embedserve_store.ids.string_hashes import hash_strings

MEMORY = 2 << 20
UNDO = 6
WAIT_S_MAX = 300
ALWAYS_CHANGED = 20
"""Number of ids of each table that every push changes."""
TABLES = {"user": (400, 8), "taste": (500, 5), "word": (300, 12)}
"""(rows, dim) of each table. user and taste share a feature, and so their ids."""
FEATURES = {"user": ["u"], "taste": ["u"], "word": ["w"]}
KNOWN = 200
"""Ids of each vocabulary at the start. Other ids in this module are positions among all possible
ids."""
IDS = 600
Values = dict[str, np.ndarray]
"""Value of each id [IDS], by table; 0 for an id that does not exist."""

devices = pytest.mark.parametrize("device", ["cpu:1", "cpu:2", pytest.param("cuda", marks=GPU)])


def names_of(table: str, ids: np.ndarray) -> list[Any]:
    """Returns ids as clients send them. Integer ids are large and unordered."""
    if table == "word":
        return [f"word {one}" for one in ids]
    return [int(one) * 0x9E3779B97F4A7C15 % 2**63 for one in ids]


class Training:
    """Pushes rows and ids, and records the values after each delta.

    Attributes:
        at: values after each delta.
    """

    def __init__(self, store: Path) -> None:
        self.store = store
        source = collection(
            [(n, *TABLES[n], FEATURES[n], PoolingType.SUM) for n in ("user", "taste", "word")]
        )
        state, vocabularies, rules = {}, {}, {}
        for table in TABLES:
            values = 1 + torch.arange(TABLES[table][0], dtype=torch.float32)
            with torch.no_grad():
                source.embedding_bags[table].weight[:] = values[:, None]
            state[table] = np.where(np.arange(IDS) < KNOWN, 1.0 + np.arange(IDS), 0)
            vocabularies[table] = names_of(table, np.arange(KNOWN))
            id_type = "string" if table == "word" else "int64"
            rules[table] = IdRule("map", id_type=id_type, unknown="skip")
        publish(source, store, model="m", dtype="float32", ids=rules, vocabularies=vocabularies)
        self.at: dict[int, Values] = {0: state}
        self.columns = ModelStore(store).manifest("m", 1).columns
        self.writer = DeltaWriter(store, model="m")
        self._random = np.random.default_rng(3)

    def push(self) -> None:
        """Pushes new ids and other rows for some ids, and removes some ids."""
        seq = self.writer.seq + 1
        after = {table: values.copy() for table, values in self.at[seq - 1].items()}
        rows, removed = {}, {}
        for tables in (("user", "taste"), ("word",)):
            values = after[tables[0]]
            known, unknown = np.flatnonzero(values), np.flatnonzero(values == 0)
            removed_ids = self._random.choice(known[known >= ALWAYS_CHANGED], 20, replace=False)
            new = self._random.choice(unknown, 22, replace=False)
            kept = np.setdiff1d(known, removed_ids)
            some = np.union1d(
                np.arange(ALWAYS_CHANGED), self._random.choice(kept, 30, replace=False)
            )
            changed = np.concatenate([some, new])
            removed[tables[0]] = names_of(tables[0], removed_ids)
            for table in tables:
                after[table][changed], after[table][removed_ids] = 1000.0 * seq + len(table), 0
                pushed = np.repeat(after[table][changed, None], TABLES[table][1], 1)
                rows[table] = names_of(table, changed), pushed.astype(np.float32)
        self.at[seq] = after
        assert self.writer.push_rows(rows, removed=removed) == seq

    def undo(self, to: int) -> None:
        self.at[self.writer.seq + 1] = self.at[to]
        undo_deltas(self.store, "m", to=to, why="wrong")
        with suppress(RevertedError):
            self.writer.push_rows({})
        self.writer.resume()

    def check(self, values: np.ndarray, seq: int) -> None:
        """Compares ``values`` [IDS, sum of dims], the values of all ids, with delta ``seq``."""
        assert values.shape == (IDS, self.columns[-1].end)
        for column in self.columns:
            found, name = values[:, column.start : column.end], column.table.name
            is_wrong = found != self.at[seq][name][:, None]
            assert not is_wrong.any(), (seq, column.key, np.argwhere(is_wrong)[:9])


class Served:
    """A version that follows deltas, and an engine over its rows."""

    def __init__(self, compiled_once: CompiledOnce, training: Training, device: str) -> None:
        self.training = training
        version = ModelStore(training.store).load("m", 1)
        models = ModelStore(training.store)
        self.line = BoundedLine(models, version.manifest)
        self.live = LiveRows(version, MEMORY, 1, UNDO, new_ids_percent=1000)
        self.engine = compiled_once.restore(self.live.version, device, live=self.live)
        upload = None if self.engine.spare_rows is None else self.engine.spare_rows.upload
        self.reader = self.engine.rows_reader = RowsReader(self.live, 0, self.engine.plan, upload)
        self._shared = SharedDeltaState(self.live)
        self.start_applier()
        self.info = ModelInfo(
            manifest=self.engine.manifest,
            plan=self.engine.plan,
            translator=self.engine.translator,
            device_type=self.engine.device_type,
            replanned=self.engine.replanned,
            lookup_kind=self.engine.lookup_kind,
        )
        rows = np.arange(IDS)
        self._ids = np.concatenate([names_of("user", rows), hash_strings(names_of("word", rows))])

    def start_applier(self) -> None:
        """Starts an applier that knows only the newest rows, as after a killed one."""
        self._follower = DeltaFollower("m", self.line, self._shared, MEMORY)

    def follow(self) -> None:
        while self._follower.poll_once() or self._follower.poll_once():
            pass  # the next poll finds deltas after an undo
        status = self._shared.status.read()
        assert status.state == FOLLOWING, status.reason

    def look_up(self) -> int:
        """Looks up all ids, compares their values, and returns the seq."""
        lengths = np.ones(2 * IDS, np.int32)
        request = LookupRequest("m", self.info.features, self._ids, lengths, None, IDS)
        assert self.engine.rows_reader is not None
        view = BatchView(self.engine.rows_reader)
        try:
            batch = join([request], self.info, view.override_rows)
            assert batch is not None
            batch.view = view
            values = self.engine.lookup(batch.resolve_rows(), batch.lengths, batch.weights)
        finally:
            view.end()
        self.training.check(values, view.seq)
        return view.seq

    def look_up_all(self) -> int:
        """Follows the line in a thread while rows are uploaded, and looks up all ids.

        An undo waits for lookups that a GPU has not yet begun with later rows.
        """
        with ThreadPoolExecutor(1) as thread:
            following = thread.submit(self.follow)
            while not following.done():
                self.reader.advance()
                time.sleep(0.001)
        following.result()
        self.reader.advance()
        return self.look_up()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    made.writer.close()


@devices
def test_lookups_follow_added_and_removed_ids(
    compiled_once: CompiledOnce, training: Training, device: str
) -> None:
    """Checks that other ids reuse the rows of removed ids, and that removed ids can return.

    The result is that of a compacted version, also after undos from memory and from the store.
    """
    served = Served(compiled_once, training, device)
    assert served.look_up_all() == 0
    for seq in range(1, 7):
        training.push()
        assert served.look_up_all() == seq
    training.undo(4)
    assert served.look_up_all() == 7
    training.push()
    assert served.look_up_all() == 8
    served.start_applier()
    training.undo(1)
    assert served.look_up_all() == 9
    for _ in range(3):  # in one step
        training.push()
    assert served.look_up_all() == 12
    served.engine.check()


@devices
@pytest.mark.parametrize("kept", ["memory", "store"])
def test_alias_moves_between_deltas_while_another_alias_follows_all(
    compiled_once: CompiledOnce, training: Training, device: str, kept: str
) -> None:
    """Checks an alias that moves between deltas while another name of the version follows all."""
    stable, canary = (Served(compiled_once, training, device) for _ in range(2))
    for _ in range(5):
        training.push()
        stable.look_up_all()
    training.undo(3)
    for bound in (5, 2, 0, 4, None, 1, 6, None):
        if kept == "store":
            stable.start_applier()
        stable.line.last_seq = bound
        training.push()
        last = training.writer.seq
        assert stable.look_up_all() == (last if bound is None else bound)
        assert canary.look_up_all() == last
    stable.engine.check()


@devices
def test_concurrent_lookups_return_the_ids_of_their_seq(
    compiled_once: CompiledOnce, training: Training, device: str
) -> None:
    """Checks threads that look up while ids change, an alias moves and rows are uploaded."""
    served, ended = Served(compiled_once, training, device), threading.Event()
    random = np.random.default_rng(5)
    found: list[set[int]] = [set() for _ in range(3)]

    def look_up_repeatedly(seqs: set[int]) -> None:
        while not ended.wait(0.001):  # leaves the deltas some time between lookups
            seqs.add(served.look_up())

    def upload_repeatedly() -> None:
        while not ended.wait(0.001):
            served.reader.advance()

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(look_up_repeatedly, seqs) for seqs in found]
        uploads = threads.submit(upload_repeatedly)
        try:
            for step in range(1000):
                is_enough = step >= 60 and all(len(seqs) > 10 for seqs in found)
                if is_enough or any(one.done() for one in running):
                    break
                training.push()
                if step % 8 == 5:
                    training.undo(max(0, training.writer.seq - int(random.integers(1, 9))))
                if step % 5 == 4:
                    back = int(random.integers(0, 9))
                    served.line.last_seq = max(0, training.writer.seq - back) if back else None
                served.follow()
        finally:
            ended.set()
        for one in (*running, uploads):
            one.result()
    assert all(len(seqs) > 10 for seqs in found)


@devices
def test_server_serves_two_aliases_bound_to_different_deltas(
    training: Training, device: str, tmp_path: Path
) -> None:
    """Checks an alias that goes back to a delta: from memory, and from the store.

    It reads from the store after the applier was killed.
    """
    for package in ("prometheus_client", "typer", "uvloop"):
        pytest.importorskip(package)  # a GPU host may lack the server's packages
    client_package = pytest.importorskip("embedserve_client")
    bags = {
        feature: [[one] for one in names_of(table, np.arange(IDS))]
        for feature, table in (("u", "user"), ("w", "word"))
    }
    for _ in range(4):
        training.push()
    set_alias(training.store, "m", "stable", 1, at_seq=2)
    set_alias(training.store, "m", "canary", 1)
    names = ("--model", "m@stable", "--model", "m@canary", "--devices", device)
    options = ("--deltas", "follow", "--follow", "alias", "--follow-s", "0.1")
    limits = ("--delta-new-ids-percent", "1000", "--delta-memory", str(MEMORY), "--workers", "1")
    log = tmp_path / "log"
    with (
        # A forked process that has imported torch may find no CUDA.
        running(training.store, log, *names, *options, *limits, is_warm=device != "cuda") as server,
        client_package.EmbedClient(server.http, timeout_s=WAIT_S_MAX) as client,
    ):

        def until(name: str, seq: int) -> None:
            ends_s = time.monotonic() + WAIT_S_MAX
            found = None
            while found != seq:
                assert time.monotonic() < ends_s, (name, found, seq)
                if found is not None:
                    time.sleep(0.03)  # the server polls every 0.1 s
                result = client.embed(bags, model=name)
                found = result.seq
                assert found is not None
                training.check(result.values, found)

        until("m@stable", 2)
        for bound in (4, 1, None, 3, 5, None):
            if bound == 3:
                kill_applier(server)
            training.push()
            set_alias(training.store, "m", "stable", 1, at_seq=bound)
            until("m@stable", training.writer.seq if bound is None else bound)
            until("m@canary", training.writer.seq)
    logged = log.read_text()
    assert "m@stable: goes back to delta 1, the last that it may have" in logged
    assert "Traceback" not in logged


def kill_applier(server: Running) -> None:
    for child in server.children():
        if Path(f"/proc/{child}/comm").read_text().strip() == PROCESS_NAME:
            os.kill(child, signal.SIGKILL)
            return
    raise AssertionError("there is no applier")
