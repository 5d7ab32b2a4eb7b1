"""Tests of the client against the server's side of HTTP/2, in memory."""

import random
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from embedserve.shard_client.call_headers import CallHeaders
from embedserve.shard_client.http2_client import Http2Client
from embedserve.shard_client.reply import Reply
from embedserve.wire.grpc.grpc_framing import framed
from embedserve.wire.grpc.statuses import HEAD_BLOCK, OK_BLOCK
from embedserve.wire.http2.connection import Http2Connection
from embedserve.wire.http2.frames import PREFACE
from embedserve.wire.http2.request_headers import ResolvedRoute, read_request
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http2.upload_budget import UploadBudget
from embedserve.wire.http_stream import Handler, Headers, HttpRequest
from embedserve.wire.response_date import ResponseDate

LIMIT = 1 << 20


class RepeatHandler(Handler):
    """A request handler that responds with the request message, repeated ``times`` times."""

    def __init__(self, times: int, stream: Stream) -> None:
        self.times, self.stream = times, stream
        self.body = b""

    def receive(self, data: bytes, is_end: bool) -> None:
        self.body += data
        self.stream.consumed(self.stream.held_bytes)
        if is_end:
            body = framed(self.body[5:] * self.times)
            self.stream.send_response(HEAD_BLOCK, (body,), len(body), OK_BLOCK)


class ConnectedPair:
    """A client and a server, and the bytes between them."""

    def __init__(self, times: int, rng: random.Random) -> None:
        self.rng = rng
        self.up, self.down = bytearray(), bytearray()
        self.server = Http2Connection(
            partial(self.resolve, times),
            UploadBudget(256 << 20, lambda: True),
            lambda: None,
            ResponseDate(),
        )
        self.client = Http2Client(self.up.extend, LIMIT, lambda: None)
        assert self.up.startswith(PREFACE)
        del self.up[: len(PREFACE)]

    def resolve(self, times: int, headers: Headers) -> ResolvedRoute | str:
        request = read_request(headers)
        assert isinstance(request, HttpRequest), request
        return ResolvedRoute(partial(RepeatHandler, times), request.content_length)

    def exchange(self, step: int) -> None:
        """Passes bytes in random chunks in both directions, until none are left."""
        while True:
            sender = self.server.frame_writer
            sender.pump()
            for chunk in sender.out:
                self.down += chunk
            sender.out.clear()
            if not (self.up or self.down or self.server.has_more):
                return
            count = self.rng.randint(1, step)
            sent, received = bytes(self.up[:count]), bytes(self.down[:count])
            del self.up[:count], self.down[:count]
            self.server.receive(sent)
            self.client.receive(received)


@given(
    st.lists(st.integers(0, 300_000), min_size=1, max_size=20),
    st.integers(1, 3),
    st.sampled_from([500, 20_000, 300_000]),
    st.integers(0, 100),
)
def test_messages_of_any_size_are_exchanged_unchanged(
    sizes: list[int], times: int, step: int, seed: int
) -> None:
    pair = ConnectedPair(times, random.Random(seed))
    headers = CallHeaders("h:1", "/s/m")
    replies: dict[int, Reply] = {}
    for number, size in enumerate(sizes):
        message = (b"%d," % number) * (size // 2)
        message = message[:size]
        pair.client.call(
            headers.block(0.5), (message[:9], message[9:]), partial(replies.__setitem__, number)
        )
    pair.exchange(step)
    for number, size in enumerate(sizes):
        message = ((b"%d," % number) * (size // 2))[:size]
        assert replies[number] == Reply(0, "", message * times)
    assert pair.client.in_flight == 0


def test_ten_thousand_calls_survive_cancelled_calls() -> None:
    pair = ConnectedPair(1, random.Random(1))
    headers = CallHeaders("h:1", "/s/m")
    replies: dict[int, Reply] = {}
    cancelled = set()
    for number in range(10_000):
        call = pair.client.call(
            headers.block(0.5), (b"%d" % number,), partial(replies.__setitem__, number)
        )
        if number % 5 == 0:
            call.cancel()
            cancelled.add(number)
        if number % 200 == 199:
            pair.exchange(100_000)
    assert not pair.client.is_closed
    assert set(replies) == set(range(10_000)) - cancelled
    assert all(reply.payload == b"%d" % number for number, reply in replies.items())
