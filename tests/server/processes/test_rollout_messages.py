"""What the supervisor tells a worker comes, in its order, before the worker takes a connection."""

from __future__ import annotations

import asyncio
import socket

from server.python import run_python

from embedserve.processes.rollout_messages import (
    MESSAGE_BYTES_MAX,
    RolloutMessage,
    RolloutStep,
    WorkerChannel,
)

SERVED = """
import os, signal, sys, time
from embedserve.metrics.shared_counters import SharedCounters
from embedserve.processes.rollout_messages import (
    MESSAGE_BYTES_MAX, RolloutMessage, RolloutStep, WorkerMessage
)
from embedserve.processes.rollout_coordinator import RolloutCoordinator
from embedserve.processes.supervisor import Supervisor

names, pause_s = [f"m{number}@canary" for number in range(int(sys.argv[1]))], float(sys.argv[2])

def run_worker(index, channel):
    channel.settimeout(10.0)
    channel.send(WorkerMessage.WARM.value)
    assert channel.recv(MESSAGE_BYTES_MAX) == WorkerMessage.GO.value
    channel.send(WorkerMessage.READY.value)
    time.sleep(pause_s)  # a worker that loads a version does not read for so long
    told = []
    while WorkerMessage.START_ACCEPTING.value not in told:
        told.append(channel.recv(MESSAGE_BYTES_MAX))
    looks, *told, alone = told
    assert looks == WorkerMessage.WATCH_STORE.value, told
    assert alone == WorkerMessage.START_ACCEPTING.value, told
    messages = map(RolloutMessage.from_bytes, told)
    shares = [(RolloutStep.SHARE, name) for name in names]
    assert [(one.step, one.name) for one in messages] == shares
    print("all", flush=True)
    os.kill(os.getppid(), signal.SIGTERM)
    assert channel.recv(MESSAGE_BYTES_MAX) == WorkerMessage.ANNOUNCE.value
    return 0

coordinator = RolloutCoordinator(dict.fromkeys(names, 1), lambda *_: None)
for name in names:
    coordinator.on_message(0, RolloutMessage(RolloutStep.SHARE, name, 1, share=5.0))
Supervisor(run_worker, SharedCounters(1, 1), drain_s=10.0, coordinator=coordinator).run()
"""


def test_a_worker_knows_the_shares_before_it_takes_connections() -> None:
    done = run_python("-c", SERVED, "3", "0")
    assert (done.stdout, done.stderr) == ("all\n", "")


def test_more_than_a_channel_holds_comes_all() -> None:
    done = run_python("-c", SERVED, "1000", "0.5")
    assert (done.stdout, done.stderr) == ("all\n", "")


async def test_a_worker_that_has_much_to_say_loses_nothing() -> None:
    """As at the first look of a server that follows hundreds of aliases."""
    ours, supervisors = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, supervisors:
        ours.setblocking(False)
        supervisors.setblocking(False)
        channel = WorkerChannel(ours)
        moves = [
            RolloutMessage(RolloutStep.DESIRED, f"m{number}", number) for number in range(1, 1001)
        ]
        for move in moves:
            channel.send(move.to_bytes())
        loop = asyncio.get_running_loop()
        for move in moves:
            message = await asyncio.wait_for(loop.sock_recv(supervisors, MESSAGE_BYTES_MAX), 10)
            assert RolloutMessage.from_bytes(message) == move
