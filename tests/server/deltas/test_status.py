"""Tests of DeltaStatus: readers in other processes see whole records, and the last one."""

import os
from dataclasses import replace
from typing import Any

import pytest
from server.deltas.fake_device import FakeDevice
from server.deltas.tables import SPECS, rows_of
from server.fake_deltas import shared_state

from embedserve.deltas import status as module
from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.deltas.status import Applied, DeltaState, DeltaStatus, Durations, SharedDeltaState
from embedserve.deltas.version_memory import SharedRecord
from embedserve.metrics.model_metrics import delta_samples
from embedserve_store import ModelVersion, StoreError
from embedserve_store.format.delta_manifest import LinePosition

START = LinePosition(7, 4, "ab" * 32)


def state_of(status: DeltaStatus, seq: int) -> DeltaState:
    applied = Applied(seq, float(seq), f"{seq:064x}")
    return replace(status.read(), applied=applied, applying=applied, rows=seq, reason="ü" * seq)


def test_state_round_trips() -> None:
    status = DeltaStatus(START)
    assert status.read().applied.position(7) == START
    written = DeltaState(
        applied=Applied(5, 1.5, "cd" * 32),
        applying=Applied(6, 2.5, "ef" * 32),
        state="held",
        reason="Grüße",
        is_ready=True,
        wanted_seq=9,
        waiting_since=3.5,
        looked_at=4.5,
        rows=10,
        nbytes=11,
        refused=12,
        rows_changed=13,
        ids_changed=17,
        memory_bytes=14,
        undos=15,
        undo_from=16,
        at_seq=18,
        apply_seconds=Durations().plus(0.02),
        freshness_seconds=Durations().plus(1000).plus(0.0),
    )
    status.write(written)
    assert status.read() == written


def test_long_reason_is_truncated_at_a_character_boundary() -> None:
    status = DeltaStatus(START)
    status.write(replace(status.read(), reason="x" + "ü" * 400))
    assert status.read().reason == "x" + "ü" * 249


def test_largest_state_fits_into_a_record() -> None:
    status, most, seconds = DeltaStatus(START), 2**64 - 1, 1e300
    state = status.read()
    values: dict[type, Any] = {
        Applied: Applied(most, seconds, "f" * 64),
        Durations: Durations((most,) * len(state.apply_seconds.counts), seconds),
        str: "x" * module.REASON_BYTES_MAX,
        bool: True,
        int: most,
        float: seconds,
        type(None): most,
    }
    largest = DeltaState(**{name: values[type(old)] for name, old in vars(state).items()})
    status.write(largest)
    assert status.read() == largest


def test_damaged_record_is_ignored_for_the_previous_record() -> None:
    """Checks that a killed writer leaves the record before it."""
    status = DeltaStatus(START)
    status.write(state_of(status, 5))
    status.write(state_of(status, 6))
    max(status._records, key=SharedRecord.read)._part[20] ^= 1
    assert status.read().applied.seq == 5
    status.write(state_of(status, 7))
    assert status.read().applied.seq == 7


def test_reader_in_another_process_sees_only_whole_records() -> None:
    status = DeltaStatus(START)
    writer = os.fork()
    if not writer:
        for seq in range(5, 3000):
            status.write(state_of(status, seq % 200))
        status.write(state_of(status, 250))
        os._exit(0)
    try:
        while (now := status.read()).rows != 250:
            assert (now.rows == now.applied.seq) or now.applied.position(7) == START
    finally:
        os.waitpid(writer, 0)


def test_dead_applier_is_described_as_stalled() -> None:
    status = DeltaStatus(START)
    status.stall("it was ended")
    described = status.describe()
    assert described.pop("lag_s") >= 0
    assert described == {
        "line": 7,
        "seq": 4,
        "wanted_seq": 4,
        "as_of": None,
        "looked_at": None,
        "state": "stalled",
        "reason": "it was ended",
        "rows_changed": 0,
        "ids_changed": 0,
        "memory_bytes": 0,
        "undo_from": 4,
    }


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.01, 0), (0.011, 1), (1e9, 13)])
def test_duration_is_counted_in_its_bucket(seconds: float, bucket: int) -> None:
    counted = Durations().plus(seconds)
    assert counted.counts.index(1) == bucket
    bounds, total = counted.samples()
    assert (bounds[-1], total) == (("+Inf", 1.0), seconds)


def test_time_and_age_of_the_last_poll_are_reported() -> None:
    status = DeltaStatus(START)
    assert (status.describe()["looked_at"], status.read().look_age_s()) == (None, 0)
    status.write(replace(status.read(), looked_at=1e9))
    assert status.describe()["looked_at"] == "2001-09-09T01:46:40.000+00:00"
    assert status.read().look_age_s() > 1e8


def test_broker_state_is_reported_only_with_notifications() -> None:
    status = DeltaStatus(START)
    assert "notify" not in shared_state(status).describe()
    notified = shared_state(status, has_broker=True)
    assert notified.describe() == status.describe() | {"notify": "disconnected"}
    assert notified.broker_connected is not None
    notified.broker_connected.set(True)
    assert notified.describe()["notify"] == "connected"
    samples = {name: value for name, _, value in delta_samples([], notified)}
    assert samples["embedserve_delta_notify_connected"] == 1
    without = [name for name, *_ in delta_samples([], shared_state(status))]
    assert [*samples.keys() - {*without}] == ["embedserve_delta_notify_connected"]


def test_status_shows_the_delta_that_is_on_the_device(
    live: LiveRows, version: ModelVersion
) -> None:
    writer, device = RowsWriter(live), FakeDevice(live, 0, version.plan)
    shared = SharedDeltaState(device.live)
    status = shared.status

    def apply(seq: int) -> None:
        writer.apply(seq, [rows_of(SPECS[0], 1, value=seq)])
        applied = Applied(seq, 1.5, "ab" * 32)
        status.write(
            replace(
                status.read(), applied=applied, applying=applied, state="following", wanted_seq=seq
            )
        )

    def described() -> tuple[int, int, str, str]:
        found = shared.describe()
        samples = {name: value for name, _, value in delta_samples([], shared)}
        assert samples["embedserve_delta_seq"] == found["seq"] == device.live.seq
        assert samples["embedserve_delta_stalled"] == (found["state"] == "stalled")
        assert (found["as_of"] is None) == (found["seq"] != status.read().applied.seq)
        return found["seq"], found["wanted_seq"], found["state"], found["reason"]

    def fail(view: int) -> None:
        raise StoreError("no memory")

    apply(1)
    assert described() == (0, 1, "catching up", "")
    device.reader.advance()
    assert described() == (1, 1, "following", "")
    upload, device.reader._upload = device.reader._upload, fail
    apply(2)
    assert described() == (1, 2, "catching up", "")
    for _ in range(2):
        with pytest.raises(StoreError, match="no memory"):
            device.reader.advance()
        reason = "changed rows do not reach the GPU: no memory"
        assert described() == (1, 2, "stalled", reason)
    assert shared.read().waiting_since == device.live.upload_since > 0
    status.write(replace(status.read(), state="held", waiting_since=2.5))
    assert described() == (1, 2, "held", reason)
    assert shared.read().waiting_since == 2.5
    status.write(replace(status.read(), state="following", waiting_since=0.0))
    device.reader._upload = upload
    device.reader.advance()
    assert described() == (2, 2, "following", "")
    assert shared.read() == status.read()
    assert shared.describe()["lag_s"] == 0


def test_failed_upload_of_a_delta_that_is_undone_is_forgotten(
    live: LiveRows, version: ModelVersion
) -> None:
    writer, device = RowsWriter(live), FakeDevice(live, 0, version.plan)
    shared = SharedDeltaState(device.live)

    def fail(view: int) -> None:
        raise RuntimeError

    writer.apply(1, [rows_of(SPECS[0], 1)])
    device.reader._upload = fail
    with pytest.raises(RuntimeError):
        device.reader.advance()
    before = device.live.uploaded
    assert before is not None
    assert device.live.upload_error == "RuntimeError"
    live.commit(*before)
    device.reader.advance()
    assert (device.live.upload_since, device.live.upload_error) == (0, "")
    assert shared.read() == shared.status.read()
