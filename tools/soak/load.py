"""Client processes of the soak: the load, and a calm neighbour whose latencies are measured."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from random import Random

import grpc
import uvloop
from server.channels import OWN_CONNECTION
from soak.calls import call_in_turn, stream_in_turn
from soak.clients import ANSWER_S_MAX, LINE_REQUESTS, OpenLoopClients, ask_in_turn
from soak.embeds import LARGE, LARGE_COUNT, LIGHT, LIGHT_COUNT, EmbedCase, asks, table
from soak.tally import ClientContext, Loss, Phases, Tally

REPORT_S = 1.0
OVERLOAD = 5.0
"""Offered load during overload, as a multiple of the measured capacity. The report has the load
that was really sent."""
MEASURED_S = 4.0
MEASURED_AT_ONCE = 16
GRPCIO = "gRPC, grpcio"
LARGE_KIND = "REST, large"
GRPCIO_CLIENTS = 4
EACH = 4
PIPELINED = 8
RATE = 15.0
"""Requests per second of a client. There are about 30 clients, one of them pipelining."""
TOLD = ("draining before the stop", "Connection refused", "GOAWAY")
"""Texts in grpcio's errors for calls that the server did not take."""


async def call_by_grpcio(site: ClientContext, asks: list[EmbedCase], rate: float) -> None:
    """Makes one call after the other with grpcio, which handles GOAWAY itself."""
    while not site.stop.is_set():
        target = f"127.0.0.1:{site.route[1]}"
        async with grpc.aio.insecure_channel(target, options=OWN_CONNECTION) as channel:
            embed = channel.unary_unary("/embedserve.v1.EmbeddingService/Embed")
            for _ in range(LINE_REQUESTS):
                if site.stop.is_set() or not await _call(site, embed, site.random.choice(asks)):
                    break
                await asyncio.sleep(site.random.uniform(0.5, 1.5) / rate)


async def _call(
    site: ClientContext, embed: grpc.aio.UnaryUnaryMultiCallable, one: EmbedCase
) -> bool:
    """Makes one call. Returns whether the channel can be used further."""
    loop = asyncio.get_running_loop()
    asked_s = loop.time()
    site.tally.sent[GRPCIO] += 1
    try:
        body = await embed(one.message, timeout=ANSWER_S_MAX)
        site.answer(GRPCIO, asked_s, one, body)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            site.refuse(GRPCIO, dict(error.trailing_metadata() or ()).get("retry-after"))
            return True
        if error.code() is grpc.StatusCode.UNAVAILABLE and any(
            told in (error.details() or "") for told in TOLD
        ):
            site.tally.not_taken[GRPCIO] += 1
            return False
        what = f"{error.code().name} {error.details()}"
        site.tally.losses.append(Loss(GRPCIO, 1, loop.time(), 0, asked_s, 0, what))
        return False
    return True


async def load(site: ClientContext, main: Connection) -> None:
    """Sends light requests of every kind all the time, and large requests during overload."""
    rows = table()
    light = list(asks(site.random, rows, LIGHT, LIGHT_COUNT))
    crowd = OpenLoopClients(site, LARGE_KIND, asks(site.random, rows, LARGE, LARGE_COUNT))
    capacity = await crowd.measure(MEASURED_S, MEASURED_AT_ONCE)
    site.phases = begin(main, capacity)
    site.taken()
    clients: list[Coroutine[None, None, None]] = [crowd.overload(OVERLOAD, capacity)]
    for _ in range(EACH):
        clients += [
            ask_in_turn(site, "REST, JSON", light, 1, RATE, is_json=True),
            ask_in_turn(site, "REST, protobuf", light, 1, RATE, is_json=False),
            ask_in_turn(site, "REST, pipelined", light, PIPELINED, RATE / 4, is_json=False),
            call_in_turn(site, "gRPC, calls", light, 2 * RATE),
            stream_in_turn(site, "gRPC, streams", light, 2 * RATE),
        ]
    clients += [call_by_grpcio(site, light, RATE) for _ in range(GRPCIO_CLIENTS)]
    await _together(clients, site, main)


async def neighbour(site: ClientContext, main: Connection) -> None:
    """Sends some light requests a second, each on a connection that stays open."""
    light = asks(site.random, table(), LIGHT, LIGHT_COUNT)
    site.phases = begin(main)
    clients: list[Coroutine[None, None, None]] = []
    for _ in range(EACH):
        clients += [
            ask_in_turn(site, "neighbour, REST", light, 1, RATE, is_json=True),
            call_in_turn(site, "neighbour, gRPC", light, RATE),
        ]
    await _together(clients, site, main)


async def _together(
    clients: list[Coroutine[None, None, None]], site: ClientContext, main: Connection
) -> None:
    asking = asyncio.gather(*clients)
    while not asking.done():
        await asyncio.wait([asking], timeout=REPORT_S)
        main.send(site.taken())
    await asking


def begin(main: Connection, capacity: float = 0.0) -> Phases:
    """Reports that this process is ready, and waits until all processes are."""
    main.send(capacity)
    phases = main.recv()
    assert isinstance(phases, Phases)
    return phases


def run(role: str, site: ClientContext, main: Connection, seed: int) -> None:
    """Runs in a process of clients: sends its counts every second, and None at the end."""
    site.tally, site.random = Tally(), Random(f"{role} {seed}")
    roles = {"load": load, "neighbour": neighbour}
    uvloop.run(roles[role](site, main))
    main.send(None)
