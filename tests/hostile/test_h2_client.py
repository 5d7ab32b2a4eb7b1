"""Tests with `h2` as a client of the running server: streams in any interleaving, exact responses.

Hypothesis draws the calls, their chunks and their order, the windows, and the operations in
between.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

import h2.events
import numpy as np
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes
from hostile import frames as f
from hostile.canary_client import embed_request
from hostile.conftest import Victim
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from embedserve_proto import embedding_pb2 as pb

EXAMPLES = 50
ANSWER_S_MAX = 20.0
CALL = [(":method", "POST"), (":scheme", "http"), (":authority", "test")]
CALL += [(":path", "/embedserve.v1.EmbeddingService/Embed")]
CALL += [("content-type", "application/grpc"), ("te", "trailers")]


@dataclass
class Planned:
    """A call as drawn by hypothesis.

    Attributes:
        chunk_count: number of DATA frames of its message.
        resets_at: the chunk before which the client resets the call; None: the call completes.
    """

    ids: list[int]
    chunk_count: int
    resets_at: int | None


@dataclass
class Plan:
    """A connection as drawn by hypothesis.

    Attributes:
        turns: indexes of the calls to continue, repeated until all calls have been sent.
        pings: turns before which the client sends a PING.
        windows: new initial windows, by turn.
        returns_window_late: whether the client returns window only when no response would
            arrive otherwise.
    """

    window: int
    calls: list[Planned]
    turns: list[int]
    pings: set[int]
    windows: dict[int, int]
    returns_window_late: bool


planned_calls = st.builds(
    Planned,
    ids=st.lists(st.integers(0, 499), min_size=1, max_size=8),
    chunk_count=st.integers(1, 5),
    resets_at=st.none() | st.none() | st.integers(0, 5),
)
plans = st.builds(
    Plan,
    window=st.sampled_from([500, 3000, 65_535, 1 << 20]),
    calls=st.lists(planned_calls, min_size=1, max_size=12),
    turns=st.lists(st.integers(0, 11), max_size=60),
    pings=st.sets(st.integers(0, 60), max_size=3),
    windows=st.dictionaries(st.integers(0, 60), st.sampled_from([500, 70_000]), max_size=3),
    returns_window_late=st.booleans(),
)


@dataclass
class Call:
    """A call in flight, and its response so far."""

    stream: int
    chunks: list[bytes]
    planned: Planned
    sent: int = 0
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    has_ended: bool = False
    is_cancelled: bool = False

    @property
    def is_sent(self) -> bool:
        return self.is_cancelled or self.sent == len(self.chunks)


class Client:
    """An `h2` client over a socket, which executes a plan."""

    def __init__(self, sock: socket.socket, plan: Plan) -> None:
        self._sock = sock
        self._plan = plan
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._h2.local_settings[SettingCodes.INITIAL_WINDOW_SIZE] = plan.window
        self._h2.local_settings.acknowledge()
        self._h2.initiate_connection()
        self._owed: dict[int, int] = {}
        self.calls: dict[int, Call] = {}
        self.pongs = 0
        self._has_settled = False
        self._flush()
        # `h2` takes the first acknowledgement for that of any earlier change.
        while not self._has_settled:
            assert self.read(wait_s=ANSWER_S_MAX), "SETTINGS were not acknowledged"

    def start(self, planned: Planned) -> Call:
        stream = self._h2.get_next_available_stream_id()
        message = f.message(embed_request(planned.ids))
        size = -(-len(message) // planned.chunk_count)
        chunks = [message[i : i + size] for i in range(0, len(message), size)]
        self.calls[stream] = Call(stream, chunks, planned)
        self._h2.send_headers(stream, CALL)
        self._flush()
        return self.calls[stream]

    def send_next(self, call: Call) -> None:
        """Sends the next chunk of ``call``, or its reset."""
        if call.planned.resets_at == call.sent:
            call.is_cancelled = True
            self._h2.reset_stream(call.stream)
        else:
            call.sent += 1
            is_last = call.sent == len(call.chunks)
            self._h2.send_data(call.stream, call.chunks[call.sent - 1], end_stream=is_last)
        self._flush()

    def do_extra_operations(self, turn: int) -> None:
        if turn in self._plan.pings:
            self._h2.ping(turn.to_bytes(8, "big"))
        if turn in self._plan.windows:
            window = self._plan.windows[turn]
            self._h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self._flush()
        self.read(wait_s=0.0)

    def read(self, wait_s: float) -> bool:
        """Handles the bytes that have arrived; returns False if there were none."""
        self._sock.settimeout(wait_s)
        try:
            received = self._sock.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return False
        assert received, "the server closed the connection"
        for one in self._h2.receive_data(received):
            self._handle_event(one)
        if not self._plan.returns_window_late:
            self.give_windows()
        self._flush()
        return True

    def give_windows(self) -> None:
        owed, self._owed = self._owed, {}
        for stream, nbytes in owed.items():
            self._h2.acknowledge_received_data(nbytes, stream)
        self._flush()

    def _handle_event(self, one: h2.events.Event) -> None:
        assert not isinstance(one, h2.events.ConnectionTerminated), one
        if isinstance(one, h2.events.PingAckReceived):
            self.pongs += 1
        if isinstance(one, h2.events.SettingsAcknowledged):
            self._has_settled = True
        call = self.calls.get(getattr(one, "stream_id", 0) or 0)
        if call is None or call.is_cancelled:
            return
        assert not isinstance(one, h2.events.StreamReset), one
        if isinstance(one, h2.events.ResponseReceived | h2.events.TrailersReceived):
            call.headers |= {str(name): str(value) for name, value in one.headers}
        elif isinstance(one, h2.events.DataReceived):
            call.body += one.data
            self._owed[call.stream] = self._owed.get(call.stream, 0) + one.flow_controlled_length
        elif isinstance(one, h2.events.StreamEnded):
            call.has_ended = True

    def _flush(self) -> None:
        self._sock.settimeout(ANSWER_S_MAX)
        self._sock.sendall(self._h2.data_to_send())

    def finish(self) -> None:
        """Reads until every call that was sent whole has its response."""
        end = monotonic() + ANSWER_S_MAX
        while any(not (call.has_ended or call.is_cancelled) for call in self.calls.values()):
            assert monotonic() < end, self.calls
            if not self.read(wait_s=0.005 if self._owed else 1.0):
                self.give_windows()

    def wait_for_pongs(self, count: int) -> None:
        end = monotonic() + ANSWER_S_MAX
        while self.pongs < count:
            assert monotonic() < end, f"{self.pongs} of {count} PINGs were answered"
            self.read(wait_s=1.0)


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


def check_response(call: Call, rows: np.ndarray) -> None:
    assert call.headers["grpc-status"] == "0", call.headers
    (size,) = (int.from_bytes(call.body[1:5], "big"),)
    assert len(call.body) == 5 + size
    values = np.frombuffer(pb.EmbedResponse.FromString(call.body[5:]).values, "<f4")
    np.testing.assert_array_equal(values.reshape(len(call.planned.ids), -1), rows[call.planned.ids])


@settings(
    max_examples=EXAMPLES,
    database=None,
    # No shrinking: it would run for minutes, so a failure is shown as drawn.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(plan=plans)
def test_calls_in_any_interleaving_are_answered_exactly(
    plan: Plan, victim: Victim, rows: np.ndarray
) -> None:
    with connected(victim.grpc_port) as sock:
        client = Client(sock, plan)
        waiting = list(plan.calls)
        in_flight: list[Call] = []
        turns = 0
        while waiting or in_flight:
            client.do_extra_operations(turns)
            which = plan.turns[turns % len(plan.turns)] if plan.turns else 0
            if which >= len(in_flight) and waiting:
                in_flight.append(client.start(waiting.pop(0)))
            else:
                client.send_next(in_flight[which % len(in_flight)])
            in_flight = [call for call in in_flight if not call.is_sent]
            turns += 1
        client.finish()
        for call in client.calls.values():
            if not call.is_cancelled:
                check_response(call, rows)
        last = client.start(Planned([1, 2, 3], 1, None))
        client.send_next(last)
        client.finish()
        check_response(last, rows)
        client.wait_for_pongs(len([turn for turn in plan.pings if turn < turns]))
