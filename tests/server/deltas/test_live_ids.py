"""Tests of ids that deltas add and remove: each lookup finds the ids of one delta, and their
rows."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from server.deltas.tables import first_values
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from embedserve.deltas import rows_writer
from embedserve.deltas.bounded_line import BoundedLine
from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.follower import DeltaFollower
from embedserve.deltas.live_ids import LiveIds
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.status import SharedDeltaState
from embedserve.deltas.version_memory import VersionMemory
from embedserve_store import (
    DeltaWriter,
    IdRule,
    ModelStore,
    ModelVersion,
    compact_deltas,
    publish,
    undo_deltas,
)
from embedserve_store.format.changed_ids import REMOVED, ChangedIds
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.id_index import mixed

ROWS = 12
IDS = [10 * n for n in range(-4, 4)]
WORDS = [f"word {n}" for n in range(8)]
State = dict[int, float]
"""Value of each id that has a row."""


def publish_tables_with_ids(folder: Path) -> None:
    """Publishes tables of integers and a table of strings. Two tables serve feature "f"."""
    tables = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=4, name=name, feature_names=names)
        for name, rows, names in (("t", ROWS, ["f"]), ("u", ROWS + 3, ["f", "g"]), ("w", 9, ["s"]))
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    with torch.no_grad():
        for one in ebc.embedding_bags.values():
            one.weight[:] = torch.arange(1.0, 1 + len(one.weight))[:, None]
    rules = {"t": IdRule("map"), "u": IdRule("map"), "w": IdRule("map", id_type="string")}
    vocabularies: dict[str, Any] = {"t": IDS, "u": IDS, "w": WORDS}
    publish(ebc, folder, model="m", dtype="float32", ids=rules, vocabularies=vocabularies)


class Model:
    """A store with one model, its training job, and the follower of its deltas."""

    def __init__(self, folder: Path, undo: int = 3, percent: float = 10.0) -> None:
        publish_tables_with_ids(folder)
        self.folder = folder
        self.writer = DeltaWriter(folder, model="m")
        self.models = ModelStore(folder)
        version = self.models.load("m")
        self.line = BoundedLine(self.models, version.manifest)
        self.live = LiveRows(version, 1 << 20, 1, undo, new_ids_percent=percent)
        self.reader = RowsReader(self.live, 0, self.live.version.plan)
        self.shared = SharedDeltaState(self.live)
        self.status = self.shared.status
        self.follower = self.started()

    def started(self) -> DeltaFollower:
        return DeltaFollower("m", self.line, self.shared, 1 << 20)

    def push(self, values: Mapping[str, Mapping[Any, float]], removed: Mapping[str, Any]) -> int:
        rows = {
            name: ([*state], np.repeat(np.array([*state.values()], np.float32)[:, None], 4, 1))
            for name, state in values.items()
        }
        return self.writer.push_rows(rows, removed=removed)

    def begin(self) -> int:
        return self.reader.begin()[0]

    def values(self, view: int, feature: int, ids: np.ndarray, table: str) -> list[float | None]:
        """Returns the values of ``ids`` of a feature as a lookup in ``view`` finds them; None for
        an unknown id."""
        counts = np.zeros(3, np.int64)
        counts[feature] = len(ids)
        override_rows = partial(self.reader.override_rows, view)
        found = self.live.version.translator.translate(ids, counts, override_rows)
        numbers = self.reader.rows_in_view(found.rows, counts, view)
        values = first_values(self.live, table, numbers)
        unknown = np.zeros(len(ids), bool) if found.unknown is None else found.unknown
        return [None if missing else v for v, missing in zip(values, unknown, strict=True)]


def values_by_id(version: ModelVersion, table: str) -> dict[int, float]:
    """Returns the value of each id of a version."""
    one, rows = version.id_maps[table], version.tables.rows(table).view(np.float32)[:, 0]
    return dict(zip(one.ids.tolist(), rows[one.rows].tolist(), strict=True))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    made = Model(tmp_path)
    yield made
    made.writer.close()


REQUESTED_IDS = np.array([*IDS, 1, 2, 3])


def test_ids_are_added_and_removed_from_their_delta_on(model: Model) -> None:
    before = model.begin()
    model.push({"t": {1: 51.0, 10: 52.0}}, {"t": [20, -40]})
    model.follower.poll_once()
    after = model.begin()
    assert model.values(before, 0, REQUESTED_IDS, "t") == [*range(1, 9), None, None, None]
    expected = [None, 2, 3, 4, 5, 52, None, 8, 51, None, None]
    assert model.values(after, 0, REQUESTED_IDS, "t") == expected
    # The other table of the feature has the id, too, with the row as published.
    expected = [None, 2, 3, 4, 5, 6, None, 8, 9, None, None]
    assert model.values(after, 1, REQUESTED_IDS, "u") == expected
    now = model.status.read()
    assert (now.rows_changed, now.ids_changed) == (2, 3)


def test_lookups_in_flight_keep_the_former_ids_of_reused_rows(model: Model) -> None:
    """Checks that a batch which began before the change has the former id with the former
    values."""
    removed_ids = [*IDS[:4]]
    model.push({"t": {n: 100.0 + n for n in (101, 102, 103, 104)}}, {})  # the rows without an id
    model.follower.poll_once()
    before = model.begin()
    model.push({"t": {105: 205.0}}, {"t": removed_ids})
    model.follower.poll_once()
    requested_ids = np.array([*removed_ids, 105])
    assert model.values(before, 0, requested_ids, "t") == [1, 2, 3, 4, None]
    assert model.values(model.begin(), 0, requested_ids, "t") == [None, None, None, None, 205]


def test_string_ids_are_added_and_removed(model: Model) -> None:
    from embedserve_store.ids.string_hashes import hash_strings

    model.push({"w": {"new": 7.5}}, {"w": ["word 3"]})
    model.follower.poll_once()
    requested_ids = hash_strings(["word 2", "word 3", "new", "other"])
    assert model.values(model.begin(), 2, requested_ids, "w") == [3, None, 7.5, None]


def test_line_is_full_at_the_limit_of_changed_ids(tmp_path: Path) -> None:
    model = Model(tmp_path, percent=0)
    model.push({"t": {10: 1.0}}, {})
    model.push({"t": {1: 1.0}}, {})
    model.follower.poll_once()
    now = model.status.read()
    assert (now.state, now.applied.seq) == ("full", 1)
    assert now.reason.startswith("table 't': 0 ids of the vocabulary have changed, 1 more are")
    assert model.values(model.begin(), 0, REQUESTED_IDS[:6], "t") == [1, 2, 3, 4, 5, 1]


def test_undo_read_from_the_store_restores_ids(tmp_path: Path) -> None:
    model = Model(tmp_path, undo=0)
    model.push({"t": {1: 51.0, 10: 52.0}}, {"t": [20]})
    model.follower.poll_once()
    model.follower = model.started()
    undo_deltas(tmp_path, "m", to=0, why="")
    model.follower.poll_once()
    assert model.status.read().applied.seq == 2
    assert model.values(model.begin(), 0, REQUESTED_IDS, "t") == [*range(1, 9), None, None, None]


def test_delta_with_a_damaged_rows_or_ids_file_is_not_applied(model: Model) -> None:
    model.push({"t": {1: 51.0}}, {})
    paths = [*model.folder.glob(f"m/deltas/1/{1:020d}.*.safetensors")]
    assert len(paths) == 2
    for path in paths:
        whole = path.read_bytes()
        path.unlink()
        path.write_bytes(whole[:-1] + b"!")
        model.follower.poll_once()
        assert model.status.read().state == "stalled"
        assert path.name in model.status.read().reason
        path.write_bytes(whole)
    model.follower.poll_once()
    assert model.values(model.begin(), 0, REQUESTED_IDS[-3:], "t") == [51, None, None]


def test_compacted_version_has_the_changed_vocabulary(model: Model) -> None:
    model.push({"t": {1: 51.0, 10: 52.0}, "w": {"new": 7.5}}, {"t": [20], "w": WORDS[:4]})
    made = compact_deltas(model.folder, "m")
    version = model.models.load("m", made.version)
    kept = {one: 1.0 + n for n, one in enumerate(IDS) if one != 20}
    assert values_by_id(version, "t") == kept | {1: 51.0, 10: 52.0}
    tables = {table.name: table for table in made.manifest.tables}
    assert [tables[name].ids.entries for name in "tuw"] == [8, 8, 5]
    assert tables["w"].ids.examples == ()  # the first four words are removed
    version.goldens()  # no id of its bags is unknown
    with DeltaWriter(model.folder, model="m") as writer:  # continues with the compacted version
        assert writer.push_rows({"t": ([2], np.full((1, 4), 9.0, np.float32))}) == 2
    assert (
        values_by_id(model.models.load("m", compact_deltas(model.folder, "m").version), "t")[2] == 9
    )


SPECS = [
    TableSpec(name, 9, 4, (name,), "sum", "float32", ids=IdRule("map", entries=20_000))
    for name in "ab"
]
OWNERS = {"a": 1, "b": 2}


@pytest.fixture
def live_ids() -> LiveIds:
    """Returns live ids with room for 2,000 ids in each of two vocabularies."""
    return LiveIds([(one,) for one in SPECS], 10, VersionMemory.create())


def entries_of(live_ids: LiveIds, table: str, ids: np.ndarray) -> list[int]:
    found: list[int] = live_ids.entries_of(
        ids, np.full(len(ids), OWNERS[table], np.uint32)
    ).tolist()
    return found


def test_each_id_of_each_vocabulary_has_its_own_entry(live_ids: LiveIds) -> None:
    random = np.random.default_rng(3)
    known: dict[str, dict[int, int]] = {"a": {}, "b": {}}
    for count in (1, 500, 1400, 98):
        ids = np.unique(random.integers(-(2**63), 2**63 - 1, count))
        changes = [ChangedIds(one, ids, n + 2 * np.arange(count)) for n, one in enumerate(SPECS)]
        found = live_ids.add_changes(changes)
        by_row = dict(zip(found.values.view(np.int64)[:, 0].tolist(), found.numbers, strict=True))
        for n, table in enumerate("ab"):
            known[table] |= {int(one): int(by_row[n + 2 * i]) for i, one in enumerate(ids)}
    assert len({*known["a"].values(), *known["b"].values()}) == 2 * 1999
    for table, entries in known.items():
        requested_ids = np.array([*entries, 5])
        assert entries_of(live_ids, table, requested_ids) == [*entries.values(), -1]
    assert live_ids._used.tolist() == [0, 1999, 1999]
    more = ChangedIds(SPECS[1], np.arange(2), np.full(2, REMOVED))
    with pytest.raises(RowsFullError, match=r"table 'b': 1999 ids .* 2 more .* the limit is 2000"):
        live_ids.add_changes([more])
    assert entries_of(live_ids, "b", np.arange(2)) == [-1, -1]
    live_ids.count_again()
    assert live_ids._used.tolist() == [0, 1999, 1999]


def test_last_row_of_an_id_changed_twice_wins(live_ids: LiveIds) -> None:
    changes = [
        ChangedIds(SPECS[0], np.array([3, 4]), np.array([1, 2])),
        ChangedIds(SPECS[0], np.array([4, 5]), np.array([REMOVED, 3])),
    ]
    found = live_ids.add_changes(changes)
    rows = dict(zip(found.numbers.tolist(), found.values.view(np.int64)[:, 0], strict=True))
    entries = entries_of(live_ids, "a", np.array([3, 4, 5]))
    assert [rows[entry] for entry in entries] == [1, REMOVED, 3]


def test_ids_chosen_by_the_unsalted_hash_do_not_collide(live_ids: LiveIds) -> None:
    """Guards against slow lookups on the event loop: each would have to pass over all ids in the
    slot."""
    slots = live_ids.entries.num_embeddings
    ids = np.arange(1 << 22)
    ids = ids[mixed(ids) >> np.uint64(64 - (slots - 1).bit_length()) == 3]
    assert len(ids) > 300
    entries = live_ids.add_changes([ChangedIds(SPECS[0], ids, np.arange(len(ids)))]).numbers
    assert np.ptp(entries) > slots / 2


class LiveIdsMachine(RuleBasedStateMachine):
    """Runs pushes, undos, polls, restarts and lookups in any order, and compares with dicts by
    seq."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.model = Model(Path(self.folder.name), undo=2)
        self.states: list[State] = [{one: 1.0 + n for n, one in enumerate(IDS)}]
        self.views: list[tuple[int, int]] = []
        self.random = np.random.default_rng(0)
        # An undo waits for lookups that began before it. Nothing else ends those lookups here.
        self.patch = pytest.MonkeyPatch()
        clock = SimpleNamespace(sleep=self.end_while_waited_for, monotonic=time.monotonic)
        self.patch.setattr(rows_writer, "time", clock)

    def end_while_waited_for(self, _: float) -> None:
        assert self.views
        self.lookups_find_the_ids_of_their_delta()
        self.end()

    @rule(
        removed_ids=st.lists(st.sampled_from([*IDS, 1, 2, 3]), unique=True, max_size=3),
        pushed=st.lists(st.sampled_from([*IDS, 1, 2, 3, 4]), unique=True, max_size=3),
    )
    def push(self, removed_ids: list[int], pushed: list[int]) -> None:
        state = self.states[-1]
        removed_ids = [one for one in removed_ids if one in state]
        values = {
            one: float(self.random.integers(100, 200)) for one in pushed if one not in removed_ids
        }
        if len({one for one in state if one not in removed_ids} | {*values}) > ROWS:
            return
        seq = self.model.push({"t": values}, {"t": removed_ids})
        assert seq == len(self.states)
        self.states.append({k: v for k, v in state.items() if k not in removed_ids} | values)

    @rule(back=st.integers(1, 6))
    def undo(self, back: int) -> None:
        to = len(self.states) - 1 - back
        if to < 0:
            return
        undo_deltas(self.model.folder, "m", to=to, why="")
        self.states.append(self.states[to])
        self.model.writer.resume()

    @rule(back=st.none() | st.integers(0, 6))
    def bound(self, back: int | None) -> None:
        """Sets or removes the last delta, as an alias does."""
        self.model.line.last_seq = None if back is None else max(0, len(self.states) - 1 - back)

    @rule()
    def poll(self) -> None:
        self.model.follower.poll_once()
        assert not self.model.status.read().reason
        last = self.model.line.last_seq
        assert last is None or self.model.live.seq <= last

    @rule()
    def restart(self) -> None:
        self.model.follower = self.model.started()

    @rule()
    def begin(self) -> None:
        if len(self.views) < 3:
            self.views.append(self.model.reader.begin())

    @rule()
    def end(self) -> None:
        if self.views:
            view, _ = self.views.pop(0)
            self.model.reader.end(view)

    @invariant()
    def lookups_find_the_ids_of_their_delta(self) -> None:
        requested_ids = np.array([*IDS, 1, 2, 3, 4])
        for view, seq in self.views:
            expected = [self.states[seq].get(one) for one in requested_ids.tolist()]
            assert self.model.values(view, 0, requested_ids, "t") == expected

    def teardown(self) -> None:
        self.model.follower.poll_once()
        self.patch.undo()
        last = self.states[-1]
        if len(self.states) > 1:
            made = compact_deltas(self.model.folder, "m")
            assert values_by_id(self.model.models.load("m", made.version), "t") == last
        self.model.writer.close()
        self.folder.cleanup()


TestLiveIds = LiveIdsMachine.TestCase
TestLiveIds.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
