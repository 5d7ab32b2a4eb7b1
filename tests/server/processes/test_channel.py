"""Tests of the channel: the supervisor's state reaches a worker before the worker accepts a
connection."""

import asyncio
import selectors
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from server.python import run_warm_python
from server.waiting import WAIT_S_MAX, until

from embedserve.processes.channel import SupervisorChannel, deliver, messages

SERVED = """
import os, signal, sys, time
from embedserve.metrics.shared_counters import SharedCounters
from embedserve.processes.rollout.coordinator import RolloutCoordinator
from embedserve.processes.rollout.served_name import RolloutVersion
from embedserve.processes.rollout.messages import (
    AliasSettings, NameStatus, StartReport, StoreEntry, StoreReport, WorkerStatus,
    desired_from_bytes, message_to_bytes
)
from embedserve.processes.supervisor import Supervisor

names, pause_s = [f"m{number}@canary" for number in range(int(sys.argv[1]))], float(sys.argv[2])

def worker_main(index, channel):
    lines = channel.makefile("rwb", buffering=0)

    def receive():
        return desired_from_bytes(lines.readline())

    serving = {name: NameStatus(1) for name in names}
    lines.write(message_to_bytes(WorkerStatus(serving)) + b"\\n")
    time.sleep(pause_s)  # a worker that loads a version does not read for so long
    desired = receive()
    found = (desired.may_listen, desired.may_accept, desired.watches_store)
    assert found == (True, False, True), desired
    lines.write(message_to_bytes(StartReport()) + b"\\n")
    while not desired.may_accept:
        desired = receive()
    assert {name: one.alias_settings for name, one in desired.names.items()} == dict.fromkeys(
        names, AliasSettings(1, 5.0)
    )
    print("all", flush=True)
    while not desired.logs_ready:
        desired = receive()
    assert len(desired.names) == len(names)
    os.kill(os.getppid(), signal.SIGTERM)
    return 0

served = {name: RolloutVersion(1, "/store/m/1") for name in names}
coordinator = RolloutCoordinator(served, lambda *_: None)
shares = {name: StoreEntry(1, AliasSettings(1, 5.0)) for name in names}
coordinator.on_report(0, StoreReport(shares))
Supervisor(worker_main, SharedCounters(1, 1), 10.0, 0.0, coordinator).run()
"""


def test_worker_gets_alias_settings_before_it_accepts_connections() -> None:
    done = run_warm_python("-c", SERVED, "3", "0")
    assert (done.stdout, done.stderr) == ("all\n", "")


def test_message_larger_than_the_channel_buffer_arrives_complete() -> None:
    done = run_warm_python("-c", SERVED, "3000", "0.5")
    assert (done.stdout, done.stderr) == ("all\n", "")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_worker_notices_the_end_of_a_supervisor_with_unread_messages(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """Covers the error that uvloop reports first, after which it reports nothing more."""

    async def end_unread() -> None:
        supervisors, ours = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(b"nobody reads this")
        supervisors.send(b"last\nin part")
        supervisors.close()
        async with asyncio.timeout(WAIT_S_MAX):
            assert [message async for message in messages(reader)] == [b"last\n"]
        writer.close()

    run(end_unread())


async def test_many_messages_of_a_worker_all_arrive_in_order() -> None:
    """Covers the first poll of a server that follows hundreds of aliases."""
    ours, supervisors = socket.socketpair()
    with supervisors, selectors.DefaultSelector() as selector:
        _, writer = await asyncio.open_unix_connection(sock=ours)
        sent = [b"%d" % number * 1000 for number in range(1000)]
        for line in sent:
            writer.write(line + b"\n")
        received: list[bytes] = []
        theirs = SupervisorChannel(supervisors, selector, lambda: None)
        async with asyncio.timeout(WAIT_S_MAX):
            while len(received) < len(sent):
                received += theirs.receive() or []
                await asyncio.sleep(0)
        assert received == sent
        writer.close()


async def test_error_of_a_message_does_not_end_the_channel() -> None:
    """Checks that later messages arrive."""
    loop, faults = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: faults.append(context["exception"]))
    received: list[int] = []
    supervisors, ours = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    delivering = asyncio.create_task(
        deliver(messages(reader), lambda line: received.append(int(line)))
    )
    with supervisors:
        for line in (b"1\n", b"no number\n", b"2\n"):
            supervisors.send(line)
        await until(lambda: received == [1, 2])
    assert [type(fault) for fault in faults] == [ValueError]
    await delivering
    writer.close()


def test_only_the_newest_state_is_queued_for_a_worker_that_does_not_read() -> None:
    """Checks that a partly sent state is completed, and that states between it and the last are
    dropped."""
    ours, workers = socket.socketpair()
    with ours, workers, selectors.DefaultSelector() as selector:
        channel = SupervisorChannel(ours, selector, lambda: None)
        sent = [b"%d" % number * (1 << 20) for number in range(5)]
        for line in sent:
            channel.send(line)
        received: list[bytes] = []
        theirs = SupervisorChannel(workers, selector, lambda: None)
        while received != [sent[0], sent[-1]]:
            for key, events in selector.select(0):
                key.data(events)
            received += theirs.receive() or []


def test_supervisor_notices_that_the_other_end_is_closed() -> None:
    ours, workers = socket.socketpair()
    workers.send(b"last\n")
    workers.close()
    with ours, selectors.DefaultSelector() as selector:
        channel = SupervisorChannel(ours, selector, lambda: None)
        assert channel.receive() == [b"last"]
        assert channel.receive() is None
        channel.send(b"nobody reads this")
        assert selector.get_key(ours).events == selectors.EVENT_READ
