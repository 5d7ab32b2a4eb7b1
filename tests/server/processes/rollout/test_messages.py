"""Tests of the messages between the supervisor and workers: each survives encoding and decoding."""

from server.processes.rollout.coordinated_workers import EIGHT, PATH, UNOPENED

from embedserve.processes.rollout.messages import (
    AdminCommand,
    AliasSettings,
    Desired,
    Failure,
    LoadState,
    NameStatus,
    Operation,
    Report,
    StartReport,
    StoreEntry,
    StoreReport,
    Target,
    TargetPhase,
    WorkerStatus,
    desired_from_bytes,
    message_to_bytes,
    report_from_bytes,
)


def test_messages_survive_encoding_and_decoding() -> None:
    failure = Failure(2**31, "é\n" * 500, is_final=True)
    target = Target(
        8, "/" + "ö" * 2000, 2, TargetPhase.PREPARE, 9, failure, AliasSettings(8, 10.0, 5.0)
    )
    names = {"shop": target, "films@1": Target(1, "", 0, TargetPhase.SERVE)}
    desired = Desired(names, True, 2, True, True, True, 4)
    statuses = {
        "m": NameStatus(1, 2, LoadState.FAILED, "no\nroom"),
        "n": NameStatus(1, 2, LoadState.FAILED, "a part is overloaded", is_final=False),
    }
    reports: list[Report | StartReport] = [
        WorkerStatus(statuses),
        StartReport(),
        StartReport("why"),
        StoreReport({"m": EIGHT, "n": StoreEntry(0, AliasSettings(0)), "o": UNOPENED}, 2),
        AdminCommand(Operation.LOAD, "m@x", 8, PATH, 5, 6),
    ]
    messages = [message_to_bytes(desired), *map(message_to_bytes, reports)]
    assert desired_from_bytes(messages[0]) == desired
    assert [*map(report_from_bytes, messages[1:])] == reports
    assert not any(b"\n" in message for message in messages)
