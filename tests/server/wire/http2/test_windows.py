"""Tests of send windows that a client opens, shrinks and makes negative, against a model."""

import random
from dataclasses import dataclass, field

import pytest
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, RstStreamFrame, SettingsFrame
from server.wire.http2.peer import OK, TAIL, Peer, body_of, has_ended, of, update

from embedserve.wire.http2.frames import WINDOW_AT_START, WINDOW_MAX

INITIAL_WINDOW_SIZE = SettingsFrame.INITIAL_WINDOW_SIZE
BODY = random.Random(0).randbytes(400_000)
SEQUENCES = 2000
ACTIONS_MAX = 30
STREAMS_MAX = 12
FRAMES_MAX = 20_000
"""Bound on the chunks that wait for a write. All bodies of a sequence need fewer, even at one
byte per iteration."""


class BoundedOutput(list[bytes | memoryview]):
    """Output that fails before an endless sender would fill the memory."""

    def append(self, chunk: bytes | memoryview) -> None:
        assert len(self) < FRAMES_MAX, "frames without end"
        super().append(chunk)


def with_bounded_output(peer: Peer) -> Peer:
    """Limits the output of the peer's connection to FRAMES_MAX chunks; returns ``peer``."""
    connection = peer.connection
    out = BoundedOutput()
    connection.frame_writer.out = connection.flow_control.out = connection.closed_streams._out = out
    connection.frame_writer.write = out.append
    return peer


def settings(window: int) -> SettingsFrame:
    return SettingsFrame(0, {INITIAL_WINDOW_SIZE: window})


@dataclass
class Model:
    """The client's view of all windows, and the expected response of each stream.

    A window counts from when its update is sent, settings from when they are acknowledged.
    """

    seed: int
    connection: int = WINDOW_AT_START
    initial: int = WINDOW_AT_START
    unacknowledged: list[int] = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)
    bodies: dict[int, bytes] = field(default_factory=dict)
    completed_streams: set[int] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)
    reset_streams: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.peer = with_bounded_output(Peer())

    def act(self) -> None:
        choices = [
            self.open,
            self.update_connection_window,
            self.update_stream_window,
            self.set_initial_window,
        ]
        choices += [self.response] * 2 + [self.send_chunk, self.reset]
        self.random.choice(choices)()

    def receive(self, frames: list[Frame]) -> None:
        """Checks the received frames against the windows."""
        for frame in frames:
            assert not isinstance(frame, GoAwayFrame), frame
            if isinstance(frame, SettingsFrame) and "ACK" in frame.flags and self.unacknowledged:
                initial = self.unacknowledged.pop(0)
                for number in self.streams:
                    self.streams[number] += initial - self.initial
                self.initial = initial
            elif isinstance(frame, DataFrame):
                self.connection -= len(frame.data)
                self.streams[frame.stream_id] -= len(frame.data)
                if frame.data:
                    assert self.connection >= 0, "beyond the connection's window"
                    assert self.streams[frame.stream_id] >= 0, "beyond a stream's window"

    def open(self) -> None:
        if len(self.streams) < STREAMS_MAX:
            number = 2 * len(self.streams) + 1
            self.peer.open(number)
            self.streams[number] = self.initial
            self.bodies[number] = b""

    def random_chunk(self) -> bytes:
        size = self.random.choice((0, 1, 100, 20_000, 70_000, 300_000))
        return BODY[: self.random.randint(0, size)]

    def unanswered(self) -> int | None:
        """Returns a stream without any response yet."""
        numbers = sorted(self.streams.keys() - self.completed_streams - self.reset_streams)
        return self.random.choice(numbers) if numbers else None

    def response(self) -> None:
        """Sends a whole response, or the headers of a response in chunks."""
        number = self.unanswered()
        if number is None:
            return
        self.completed_streams.add(number)
        stream = self.peer.handlers[number].stream
        if self.random.random() < 0.3:
            stream.send_head(OK)
            self.unfinished.add(number)
        else:
            self.bodies[number] = body = self.random_chunk()
            stream.send_response(OK, (body,), len(body), self.random.choice((b"", TAIL)))
        if self.random.random() < 0.5:
            self.receive(self.peer.take())

    def send_chunk(self) -> None:
        """Sends the next chunk of a response in chunks, or its end."""
        if not self.unfinished:
            return
        number = self.random.choice(sorted(self.unfinished))
        stream = self.peer.handlers[number].stream
        if self.random.random() < 0.3:
            self.finish(number)
        else:
            chunk = self.random_chunk()
            self.bodies[number] += chunk
            stream.send_body((chunk,), len(chunk))

    def finish(self, number: int) -> None:
        self.peer.handlers[number].stream.end(self.random.choice((b"", TAIL)))
        self.unfinished.discard(number)

    def reset(self) -> None:
        if self.streams and self.random.random() < 0.2:
            number = self.random.choice(sorted(self.streams))
            self.reset_streams.add(number)
            self.unfinished.discard(number)
            self.receive(self.peer.send(RstStreamFrame(number, error_code=8)))

    def update_connection_window(self) -> None:
        increment = self.random.choice((1, 100, 16_384, 100_000, 1_000_000))
        self.connection += increment
        self.receive(self.peer.send(update(0, increment)))

    def update_stream_window(self) -> None:
        if not self.streams:
            return
        number = self.random.choice(sorted(self.streams))
        increment = self.random.choice((1, 100, 16_384, 100_000))
        most = max(self.unacknowledged, default=self.initial)
        if self.streams[number] + max(0, most - self.initial) + increment <= WINDOW_MAX:
            self.streams[number] += increment
            self.receive(self.peer.send(update(number, increment)))

    def set_initial_window(self) -> None:
        window = self.random.choice((0, 0, 1, 100, 10_000, 65_535, 200_000, 5_000_000))
        self.unacknowledged.append(window)
        self.receive(self.peer.send(settings(window)))

    def end(self) -> None:
        """Opens all windows, and checks that every response arrives whole."""
        for number in sorted(self.unfinished):
            self.finish(number)
        self.connection += 20_000_000
        self.unacknowledged.append(20_000_000)
        self.receive(self.peer.send(update(0, 20_000_000), settings(20_000_000)))
        sender = self.peer.connection.frame_writer
        for number in self.completed_streams - self.reset_streams:
            assert body_of(self.peer.seen, number) == self.bodies[number]
            assert has_ended(self.peer.seen, number)
        assert (sender.unsent_bytes, sender.blocked_streams) == (0, {})
        assert not sender.ready


def test_random_window_changes_never_lose_bytes_or_exceed_a_window() -> None:
    """Checks RFC 9113, section 6.9.2: SETTINGS may make a window negative at any time."""
    for seed in range(SEQUENCES):
        model = Model(seed)
        try:
            for _ in range(model.random.randint(1, ACTIONS_MAX)):
                model.act()
            model.end()
        except AssertionError as error:
            raise AssertionError(f"sequence {seed}: {error}") from error


@pytest.mark.parametrize("window", [0, 1000])
def test_stream_with_a_negative_window_waits_for_an_update(window: int) -> None:
    """Makes a stream's window negative while it waits for the connection's window, which opens
    afterwards. The server must send nothing, and the stream counts as blocked by its client.
    """
    peer = with_bounded_output(Peer(settings={INITIAL_WINDOW_SIZE: 100_000}))
    stream = peer.open(1).stream
    stream.send_response(OK, (BODY,), len(BODY), TAIL)
    assert len(body_of(peer.take(), 1)) == WINDOW_AT_START
    peer.send(settings(window))
    assert of(peer.send(update(0, 1_000_000)), DataFrame) == []
    assert (stream.send_window, peer.connection.frame_writer.blocked_streams) == (
        window - WINDOW_AT_START,
        {1: stream},
    )
    assert stream.blocked_since_s > 0
    peer.send(update(1, len(BODY)))
    assert body_of(peer.seen, 1) == BODY
    assert has_ended(peer.seen, 1)


def test_shrunken_stream_window_does_not_block_other_streams() -> None:
    peer = with_bounded_output(Peer(settings={INITIAL_WINDOW_SIZE: 100_000}))
    peer.open(1).stream.send_response(OK, (BODY,), len(BODY), TAIL)
    peer.take()
    peer.send(settings(100))
    peer.open(3).stream.send_response(OK, (b"x" * 100,), 100, TAIL)
    frames = peer.send(update(0, 1_000_000))
    assert (body_of(frames, 1), body_of(frames, 3)) == (b"", b"x" * 100)
