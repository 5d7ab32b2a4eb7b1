"""Large bodies, which others wait for no longer than for small ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop
from server.fake_engine import FakeEngine
from server.live import PROTOBUF, make_exchange
from server.raw_http import our_server, post, read_answer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Overriding the .event_loop_policy. fixture:pytest.PytestDeprecationWarning"
)
BODY_BYTES = 16 << 20


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop that serves: it reads a connection 32 times in one turn, where it may."""
    policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
    return policy


async def test_a_large_body_is_read_piece_by_piece_with_turns_for_others_between(
    engine: FakeEngine, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    turns = 0
    pieces = Counter[int]()

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    loop.call_soon(turn)
    async with our_server(make_exchange(engine, executor=executor)) as server:

        def has_grown(nbytes: int) -> None:
            pieces[turns] += nbytes

        monkeypatch.setattr(server.wire, "has_grown", has_grown)
        reader, writer = await server.open()
        writer.write(post(bytes(BODY_BYTES), f"Content-Type: {PROTOBUF}"))
        status, _, _ = await read_answer(reader)
        writer.close()
    assert status == 413  # of what it costs, which is seen once it is whole
    assert pieces.total() >= BODY_BYTES
    assert max(pieces.values()) <= 256 << 10
