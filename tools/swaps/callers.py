"""Steady callers of `make swaps`: each sends REST or gRPC requests at its pace, and checks them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic

import grpc
from swaps.server import CallTarget, Request

RATE = 50.0
"""Requests per second of each caller."""


@dataclass
class CallResults:
    """Responses that the steady callers got.

    Attributes:
        waits: (start, seconds) of each response.
        answers: responses by version.
        first_s: time of the first response of each version, since it was awaited.
    """

    waits: list[tuple[float, float]] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first_s: dict[int, float] = field(default_factory=dict)

    def note(self, asked_s: float, request: Request, body: bytes, is_followed: bool) -> None:
        now_s = monotonic()
        version = request.version_of(body)
        if version is None:
            self.wrong.append(f"a wrong answer: {body[:80]!r}")
            return
        self.waits.append((asked_s, now_s - asked_s))
        self.answers[version] += 1
        if is_followed:
            self.first_s.setdefault(version, now_s)


async def ask_rest(
    port: int,
    method: str,
    requests: Sequence[Request],
    results: CallResults,
    random: Random,
    target: CallTarget,
) -> None:
    """Posts requests to the path of ``target`` until it is cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            request = random.choice(requests)
            asked_s = monotonic()
            writer.write(head_of(target.path, request) + request.message)
            head = await reader.readuntil(b"\r\n\r\n")
            found = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(found[1]) if found else 0)
            if head.startswith(b"HTTP/1.1 200"):
                results.note(asked_s, request, body, target.is_followed)
            else:
                results.wrong.append(f"REST: {head[:40]!r} {body[:200]!r}")
            await asyncio.sleep(random.uniform(0.5, 1.5) / RATE)
    finally:
        writer.close()


def head_of(path: str, request: Request) -> bytes:
    headers = {
        "Host": "localhost",
        **request.codec.headers(request.message),
        "Content-Length": str(len(request.message)),
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def ask_grpc(
    port: int,
    method: str,
    requests: Sequence[Request],
    results: CallResults,
    random: Random,
    target: CallTarget,
) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        embed = channel.unary_unary(method)
        while True:
            request = random.choice(requests)
            asked_s = monotonic()
            try:
                body = await embed(target.prefix + request.message)
                results.note(asked_s, request, body, target.is_followed)
            except grpc.aio.AioRpcError as error:
                results.wrong.append(f"gRPC: {error.code().name} {error.details()}")
            await asyncio.sleep(random.uniform(0.5, 1.5) / RATE)
