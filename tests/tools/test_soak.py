"""Tests of the soak: a short one finds nothing, and faults would be found."""

import os
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from soak.embeds import DIM, LIGHT, ROWS, EmbedCase, asks, table
from soak.faults import HANG, KILL, RESTART, Fault, Servers, held_ports, planned
from soak.load import GRPCIO
from soak.report import GRPCIO_LOST_MAX, Report, judge, print_table
from soak.soak import an_hours_share, soak
from soak.tally import Loss, Phases, Tally
from soak.watch import EVERY_S, SAMPLES_MIN, Sample, Watch, drift

SECONDS = 20.0
ONE_OF_EACH = {KILL: 1, HANG: 1, RESTART: 1}
KINDS = {
    *("REST, JSON", "REST, protobuf", "REST, pipelined", "REST, large"),
    *("gRPC, calls", "gRPC, streams", "gRPC, grpcio", "neighbour, REST", "neighbour, gRPC"),
}
PHASES = Phases(start_s=100.0, each_s=10.0)
LOSS = Loss("REST, JSON", 1, 111.0, 4000, 90.0, 7, "ended")
KILLED = Fault(KILL, 110.0, True, frozenset({4000}), gone_s=110.1, whole_s=120.0)


@pytest.mark.soak
def test_short_soak_finds_nothing_wrong(tmp_path: Path) -> None:
    report = soak(tmp_path, SECONDS, seed=1, counts=ONE_OF_EACH)
    print_table(report)
    assert report.wrong == []
    assert Counter(fault.kind for fault in report.faults) == ONE_OF_EACH
    assert set(report.tally.sent) == KINDS
    assert report.tally.refused["REST, large"]
    assert report.rude.total() > report.rude["cut"]
    assert report.watch.samples


def report_of(*faults: Fault, tally: Tally, log: Path, text: str = "") -> Report:
    """Returns the report of a soak in which ``faults`` happened as planned."""
    log.write_text(text or "worker 1 was ended by SIGKILL: restarted\n" * len(faults))
    planned = {KILL: len(faults), HANG: 0, RESTART: 0}
    watch = Watch(Servers(log, log.parent, None), PHASES)  # type: ignore[arg-type]
    report = Report(PHASES, planned, 300.0, watch, list(faults), [log], tally)
    judge(report)
    return report


def tally_of(*losses: Loss, answered: int = 5) -> Tally:
    sent = Counter({"REST, JSON": answered + sum(loss.count for loss in losses)})
    counts = Counter({"REST, JSON": answered})
    tally = Tally(sent=sent, answered=counts, losses=list(losses))
    tally.sent["REST, large"], tally.answered["REST, large"] = 2, 1
    tally.refused["REST, large"] = 1
    return tally


def test_requests_held_by_a_killed_worker_may_be_lost(tmp_path: Path) -> None:
    report = report_of(KILLED, tally=tally_of(LOSS), log=tmp_path / "log")
    assert report.wrong == []
    assert report.faults[0].lost == {"REST, JSON": 1}


def test_requests_not_held_by_the_killed_worker_must_not_be_lost(tmp_path: Path) -> None:
    for loss in (
        replace(LOSS, port=4001),  # the other worker's
        replace(LOSS, at_s=105.0),  # before
        replace(LOSS, at_s=150.0),  # long after
        replace(LOSS, port=4001, opened_s=109.9),  # new, but has responses
        replace(LOSS, opened_s=110.5),  # a later connection of the port
        replace(LOSS, port=4001, opened_s=110.3, answered=0),  # new, and too late for its socket
    ):
        fault = replace(KILLED, lost={})
        (wrong,) = report_of(fault, tally=tally_of(loss), log=tmp_path / "log").wrong
        assert str(loss) in wrong


def test_unaccepted_connection_counts_as_held() -> None:
    for opened_s in (109.9, 110.11):  # the kernel closes the sockets a moment later
        assert KILLED.explains(replace(LOSS, port=4001, opened_s=opened_s, answered=0))


def test_restart_must_lose_no_request() -> None:
    assert not replace(KILLED, kind=RESTART).explains(LOSS)


def test_wrong_results_are_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    unaccounted = tally_of()
    unaccounted.sent["REST, JSON"] += 1
    calm = tally_of()
    calm.refused["REST, large"], calm.sent["REST, large"] = 0, 1
    false = tally_of()
    false.say_wrong("a wrong answer")
    too_many = Tally(
        sent=Counter({GRPCIO: 10, "REST, large": 2}),
        answered=Counter({GRPCIO: 1, "REST, large": 1}),
        refused=Counter({"REST, large": 1}),
        losses=[replace(LOSS, kind=GRPCIO, port=0, count=GRPCIO_LOST_MAX + 1)],
    )
    cases = [
        (report_of(tally=unaccounted, log=log), "6 sent, and it is known of 5"),
        (report_of(tally=calm, log=log), "there was no overload"),
        (report_of(tally=false, log=log), "a wrong answer"),
        (report_of(replace(KILLED, whole_s=0.0), tally=tally_of(), log=log), "1 planned, 0 done"),
        (report_of(KILLED, tally=tally_of(), log=log, text="-"), "0 workers ended, 1 of them"),
        (report_of(tally=tally_of(), log=log, text="Traceback"), "the server's log"),
        (report_of(tally=tally_of(), log=log, text="hangs: no heartbeat"), "1 workers hung"),
        (report_of(replace(KILLED, lost={}), tally=too_many, log=log), "grpcio lost 9"),
    ]
    for report, expected in cases:
        assert [expected in one for one in report.wrong] == [True], report.wrong


def test_growing_memory_and_latency_are_reported(tmp_path: Path) -> None:
    report = report_of(tally=tally_of(), log=tmp_path / "log")
    for number in range(400):
        sample = Sample({1: 20.0, 2: 300.0 + number, 3: 300.0 + number}, [float(number * number)])
        report.watch.samples.append(sample)
    judge(report)
    assert len(report.wrong) == 4
    assert sum("workers grew" in one for one in report.wrong) == 2
    assert sum("a process grew" in one for one in report.wrong) == 1
    assert sum("p99 rose" in one for one in report.wrong) == 1


def test_samples_near_faults_and_between_phases_are_ignored() -> None:
    watch = Watch(None, PHASES)  # type: ignore[arg-type]
    watch.samples = [Sample(waits_ms=[float(number)]) for number in range(10)]
    calm = watch.of_phase(False, [(103.0, 104.5)])
    assert EVERY_S == 2.0
    assert [sample.p99_ms for sample in calm] == [0.0, 3.0]
    assert [sample.p99_ms for sample in watch.of_phase(True, [])] == [5.0, 6.0, 7.0, 8.0]


def test_drift_compares_the_first_and_last_quarter() -> None:
    assert drift([1.0] * (SAMPLES_MIN - 1)) is None
    assert drift([float(one // 10) for one in range(40)]) == (1.0, 3.0)


def test_fault_plan_covers_calm_and_overload() -> None:
    plan = planned(Random(3), {KILL: 2, HANG: 2, RESTART: 2}, PHASES, seconds=60.0)
    assert plan == planned(Random(3), {KILL: 2, HANG: 2, RESTART: 2}, PHASES, seconds=60.0)
    assert Counter((kind, PHASES.is_overload(at_s)) for at_s, kind in plan) == {
        (kind, is_overload): 1 for kind in (KILL, HANG, RESTART) for is_overload in (False, True)
    }
    assert all(100 <= at_s < 160 for at_s, _ in plan)
    assert an_hours_share(60) == {KILL: 20, HANG: 10, RESTART: 20}
    assert an_hours_share(1) == ONE_OF_EACH


def test_held_ports_include_accepted_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        with socket.create_connection(address) as client:
            accepted, _ = listening.accept()
            with accepted:
                assert client.getsockname()[1] in held_ports(os.getpid())


def test_responses_are_compared_exactly() -> None:
    one: EmbedCase = asks(Random(1), table(), LIGHT, 1)[0]
    right = b'{"values":%b}' % str(one.values.tolist()).encode()
    assert one.is_answer(right)
    assert one.is_answer(right)
    assert not one.is_answer(right.replace(b".0]", b".5]", 1))
    assert not one.is_answer(b'{"error":{}}')
    assert not one.is_answer(b"")
    assert table().shape == (ROWS, DIM)
    assert len(np.unique(table()[:, 0])) == ROWS
    assert one.values.dtype == np.float32
