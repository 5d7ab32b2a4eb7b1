"""CPU time of a router's client for one call of a shard, in microseconds.

    PYTHONPATH=server:model_store:proto python bench/experiments/shard_client_costs.py

Constant replies come from a process of its own over loopback; the client's user and system time are
divided by its calls. "frames" is the same work without sockets and event loop. The best of several
rounds is reported.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from resource import RUSAGE_SELF, getrusage

import uvloop

from embedserve.model_names import VersionKey
from embedserve.shard_client.call_headers import CallHeaders
from embedserve.shard_client.client_stream import OnReply
from embedserve.shard_client.http2_client import Http2Client
from embedserve.shard_client.part_client import PartClient, PartOptions
from embedserve.shard_client.reply import Reply
from embedserve.shard_client.shard_connection import SERVICE, ConnectionOptions, ShardConnection
from embedserve.shard_client.timer_queue import TimerQueue
from embedserve.wire.grpc.grpc_framing import framed
from embedserve.wire.grpc.statuses import HEAD_BLOCK, OK_BLOCK
from embedserve.wire.http2 import frames
from embedserve.wire.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    HEADERS,
    PREFACE,
)
from embedserve_proto.embedding_pb2 import ListModelsResponse, Model

ROUNDS = 7
CALLS = 10_000
REQUEST_BYTES = 8 << 10
"""Bytes of a request: 860 ids of a batch of 25, with lengths."""
JOIN_S = 0.5
"""Seconds until the replica has joined; a lookup before that fails the script."""
KEY = VersionKey("dlrm", 1)
LISTED = ListModelsResponse(
    models=[Model(model="dlrm", version=1, fingerprint="f", part=0, parts=1)]
).SerializeToString()


def response(stream_id: int, message: bytes, frame_bytes: int = 16384) -> bytes:
    """Returns the frames of a response."""
    body = framed(message)
    pieces = [frames.frame_header(len(HEAD_BLOCK), HEADERS, END_HEADERS, stream_id), HEAD_BLOCK]
    for start in range(0, len(body), frame_bytes):
        chunk = body[start : start + frame_bytes]
        pieces += [frames.frame_header(len(chunk), DATA, 0, stream_id), chunk]
    pieces += [
        frames.frame_header(len(OK_BLOCK), HEADERS, END_HEADERS | END_STREAM, stream_id),
        OK_BLOCK,
    ]
    return b"".join(pieces)


class ConstantShard(asyncio.Protocol):
    """Answers each request with the same message, and ListModels with LISTED."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._left = b""
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        windows = (frames.SETTINGS_INITIAL_WINDOW_SIZE, 1 << 20)
        self._write(frames.settings(windows) + frames.window_update(0, 1 << 30))

    def _write(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        data = self._left + data
        position = 0
        if data.startswith(PREFACE):
            position = len(PREFACE)
        lists = set()
        while position + FRAME_HEADER_BYTES <= len(data):
            upper, lower, kind, flags, stream_id = FRAME_HEADER.unpack_from(data, position)
            after = position + FRAME_HEADER_BYTES + (upper << 16 | lower)
            if after > len(data):
                break
            if kind == HEADERS and b"/ListModels" in data[position:after]:
                lists.add(stream_id)
            if kind == DATA:
                self._received += after - position
                if flags & END_STREAM:
                    message = LISTED if stream_id in lists else self._message
                    self._write(response(stream_id, message))
            position = after
        self._left = data[position:]
        if self._received > 1 << 28:
            self._write(frames.window_update(0, self._received))
            self._received = 0


def serve(message_bytes: int, channel: Connection) -> None:
    """Serves until the process is terminated; sends the port."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        message = b"x" * message_bytes
        server = await loop.create_server(lambda: ConstantShard(message), "127.0.0.1", 0)
        channel.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())


async def cost_us(start: Callable[[OnReply], object], in_flight: int) -> tuple[float, float]:
    """Returns the microseconds of (user, system) time of a call, with ``in_flight`` at a time."""
    best = (float("inf"), float("inf"))
    for _ in range(ROUNDS):
        done = asyncio.Event()
        left = CALLS

        def on_done(reply: Reply, done: asyncio.Event = done) -> None:
            nonlocal left
            assert reply.status == 0, reply
            left -= 1
            if left >= in_flight:
                start(on_done)
            elif not left:
                done.set()

        before = getrusage(RUSAGE_SELF)
        for _ in range(in_flight):
            start(on_done)
        await done.wait()
        after = getrusage(RUSAGE_SELF)
        user_s, system_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        best = min(best, (user_s / CALLS * 1e6, system_s / CALLS * 1e6), key=sum)
    return best


def frames_us(message_bytes: int) -> float:
    """Returns the CPU microseconds of a call without sockets."""
    client = Http2Client(len, 64 << 20, lambda: None)
    client.receive(
        frames.settings((frames.SETTINGS_INITIAL_WINDOW_SIZE, 1 << 20))
        + frames.window_update(0, 1 << 30)
    )
    headers = CallHeaders("127.0.0.1:8001", SERVICE + "Embed")
    request, message = (b"x" * REQUEST_BYTES,), b"x" * message_bytes
    best = float("inf")
    for _ in range(ROUNDS):
        sent = [response(client.next_id + 2 * n, message, 1 << 20) for n in range(1000)]
        client.window = 1 << 30
        start_s = time.process_time()
        for data in sent:
            client.call(headers.block(0.5), request, _ignore)
            client.receive(data)
        best = min(best, (time.process_time() - start_s) / len(sent))
    return best * 1e6


def _ignore(reply: Reply) -> None:
    assert reply.status == 0


async def measure(message_bytes: int, port: int) -> None:
    """Prints the costs of calls with a reply of ``message_bytes``."""
    request = (b"x" * REQUEST_BYTES,)
    ready = asyncio.Event()
    options = ConnectionOptions()
    connection = ShardConnection(("127.0.0.1", port), options, ready.set, print)
    await ready.wait()
    part = PartClient(
        0,
        1,
        lambda address, *events: ShardConnection(address, options, *events),
        PartOptions(),
        TimerQueue(time.monotonic, asyncio.get_running_loop().call_later),
    )
    part.expect(KEY, "f")
    part.set_addresses([("127.0.0.1", port)])
    await asyncio.sleep(JOIN_S)
    print(f"reply of {message_bytes} bytes:")
    print(f"  frames                {frames_us(message_bytes):6.1f}")
    for in_flight in (1, 16):
        call = await cost_us(lambda done: connection.call(request, 0.5, done), in_flight)
        look_up = await cost_us(
            lambda done: part.look_up(KEY, request, time.monotonic() + 0.5, done), in_flight
        )
        for name, (user, system) in {"call": call, "lookup": look_up}.items():
            print(f"  {name:8} {in_flight:2} in flight {user:6.1f} user, {system:6.1f} system")
    part.close()
    connection.finish("measured")


def main() -> None:
    """Measures replies of 2 KB and 50 KB."""
    context = multiprocessing.get_context("spawn")
    for message_bytes in (2 << 10, 50 << 10):
        receiver, sender = context.Pipe()
        process = context.Process(target=serve, args=(message_bytes, sender), daemon=True)
        process.start()
        try:
            uvloop.run(measure(message_bytes, receiver.recv()))
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
