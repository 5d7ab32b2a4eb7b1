"""Hypothesis strategies for a client's frames: valid sequences, and sequences with faults."""

import itertools
import struct
from collections.abc import Callable

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hostile import frames as f
from hypothesis import strategies as st

STREAMS_MAX = 128
FIELDS = [
    ("x-test", "a"),
    ("x-test", ""),
    ("accept", "application/grpc"),
    ("a-long-name-of-a-header", "z" * 60),
    ("te", "trailers"),
    ("content-length", "0"),
]
WRONG_FIELDS = [
    ("X-Test", "a"),
    ("connection", "close"),
    ("te", "gzip"),
    ("transfer-encoding", "chunked"),
    (":path", "/again"),
    (":method", "GET"),
    (":unknown", "a"),
    ("content-length", "7"),
    ("content-length", "x"),
    ("a b", "c"),
    ("", "c"),
    ("x-test", "b\r\nc"),
    ("x-test", " b"),
]
CHANGEABLE = [
    SettingCodes.INITIAL_WINDOW_SIZE,
    SettingCodes.HEADER_TABLE_SIZE,
    SettingCodes.MAX_HEADER_LIST_SIZE,
    SettingCodes.MAX_CONCURRENT_STREAMS,
]

streams = st.integers(0, 5)
"""Indexes of opened streams, counted back from the newest, which is 0."""
fields = st.lists(st.sampled_from(FIELDS[:5]), max_size=3)
wrong_fields = st.lists(st.sampled_from(FIELDS + WRONG_FIELDS), min_size=1, max_size=3)
opens = st.tuples(st.just("open"), st.integers(0, 1), st.booleans(), fields)
operations = st.one_of(
    opens,
    opens,
    st.tuples(st.just("data"), streams, st.booleans(), st.binary(max_size=40)),
    st.tuples(st.just("data"), streams, st.booleans(), st.binary(max_size=40)),
    st.tuples(st.just("trailers"), streams, st.just(True), fields),
    st.tuples(st.just("reset"), streams, st.just(True), st.sampled_from([0, 2, 8, 99])),
    st.tuples(st.just("ping"), st.just(0), st.just(True), st.binary(min_size=8, max_size=8)),
    st.tuples(st.just("window"), streams, st.booleans(), st.integers(1, 100_000)),
    st.tuples(
        st.just("settings"),
        st.just(0),
        st.just(True),
        st.dictionaries(st.sampled_from(CHANGEABLE), st.integers(0, 65_536), max_size=2),
    ),
    st.tuples(st.just("priority"), streams, st.booleans(), st.sampled_from((0, 11))),
)
wrong_opens = st.tuples(st.just("open"), st.integers(0, 1), st.booleans(), wrong_fields)
wrong_trailers = st.tuples(st.just("trailers"), streams, st.just(True), wrong_fields)
Operation = tuple[str, int, bool, object]


class Script:
    """A client of `h2` that records its frames one by one."""

    def __init__(self, server_settings: bytes) -> None:
        config = H2Configuration(
            client_side=True,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self._client = H2Connection(config)
        # RFC 8441's setting is left out, because the library knows and checks it.
        self._client.local_settings = Settings(initial_values={SettingCodes.ENABLE_PUSH: 0})
        self._opened: list[int] = []
        self._client.initiate_connection()
        start = self._client.data_to_send()
        assert start.startswith(f.PREFACE)
        self.frames = split_frames(start[len(f.PREFACE) :])
        self._client.receive_data(server_settings)
        self._take()

    def _take(self) -> None:
        self.frames += split_frames(self._client.data_to_send())

    def do(self, operation: Operation) -> None:
        """Does ``operation``, unless a valid client could not do it at this point."""
        kind, number, flag, value = operation
        try:
            getattr(self, f"_{kind}")(number, flag, value)
        except (KeyError, ProtocolError):
            self._client.clear_outbound_data_buffer()
        self._take()

    def _open(self, skipped: int, ends: bool, more: list[tuple[str, str]]) -> None:
        stream = self._client.highest_outbound_stream_id + 2 + 2 * skipped
        stream -= not self._opened
        head = [(":method", "GET" if ends else "POST"), (":scheme", "http")]
        head += [(":path", "/health/live"), (":authority", "test")]
        self._client.send_headers(stream, [*head, *more], end_stream=ends)
        self._opened.append(stream)

    def _stream(self, back: int) -> int:
        """Returns an opened stream, or 1 if none has been opened."""
        return self._opened[-1 - back % len(self._opened)] if self._opened else 1

    def _data(self, back: int, ends: bool, payload: bytes) -> None:
        self._client.send_data(self._stream(back), payload, end_stream=ends)

    def _trailers(self, back: int, _: bool, fields: list[tuple[str, str]]) -> None:
        if self._opened:
            self._client.send_headers(
                self._stream(back), [("x-end", "1"), *fields], end_stream=True
            )

    def _reset(self, back: int, _: bool, code: int) -> None:
        self._client.reset_stream(self._stream(back), code)

    def _ping(self, _back: int, _: bool, payload: bytes) -> None:
        self._client.ping(payload)

    def _window(self, back: int, of_stream: bool, nbytes: int) -> None:
        stream = self._stream(back) if of_stream else None
        self._client.increment_flow_control_window(nbytes, stream)

    def _settings(self, _back: int, _: bool, values: dict[SettingCodes, int]) -> None:
        self._client.update_settings({int(number): value for number, value in values.items()})

    def _priority(self, back: int, exclusive: bool, on: int) -> None:
        stream = self._stream(back)
        self._client.prioritize(stream, weight=7, depends_on=on & ~stream, exclusive=exclusive)


def split_frames(data: bytes) -> list[bytes]:
    buffer = bytearray(data)
    parts = []
    while buffer:
        end = 9 + int.from_bytes(buffer[:3], "big")
        parts.append(bytes(buffer[:end]))
        del buffer[:end]
    return parts


def frame_ends(data: bytes) -> list[int]:
    """Returns the offsets at which a client's preface and frames in ``data`` end."""
    ends = [len(f.PREFACE)]
    while ends[-1] + 9 <= len(data):
        ends.append(ends[-1] + 9 + int.from_bytes(data[ends[-1] : ends[-1] + 3], "big"))
    return [end for end in ends if end <= len(data)]


def drop(frames: list[bytes], at: int, _value: int) -> None:
    del frames[at]


def duplicate(frames: list[bytes], at: int, _value: int) -> None:
    frames.insert(at, frames[at])


def move(frames: list[bytes], at: int, value: int) -> None:
    frames.insert(value % len(frames), frames.pop(at))


def flip(frames: list[bytes], at: int, value: int) -> None:
    """Flips a bit in one byte of a frame; the byte may be in its header, except in the length."""
    one = bytearray(frames[at])
    one[3 + value % (len(one) - 3)] ^= 1 << value % 8
    frames[at] = bytes(one)


def change_flags(frames: list[bytes], at: int, value: int) -> None:
    one = bytearray(frames[at])
    one[4] ^= value & 0x2D
    frames[at] = bytes(one)


def change_stream(frames: list[bytes], at: int, value: int) -> None:
    frames[at] = frames[at][:5] + struct.pack(">L", value % 12) + frames[at][9:]


def change_type(frames: list[bytes], at: int, value: int) -> None:
    frames[at] = frames[at][:3] + bytes([value % 11]) + frames[at][4:]


def truncate(frames: list[bytes], at: int, value: int) -> None:
    """Cuts off the payload's end, and sets the length accordingly."""
    one = frames[at]
    kept = one[9 : 9 + value % (len(one) - 8)]
    frames[at] = f.frame(one[3], one[4], int.from_bytes(one[5:9], "big"), kept)


def falsify_length(frames: list[bytes], at: int, value: int) -> None:
    """Sets the length to a number that differs from the bytes that follow."""
    frames[at] = (value % 64).to_bytes(3, "big") + frames[at][3:]


def insert(frames: list[bytes], at: int, value: int) -> None:
    made = f.frame(value % 12, value >> 4 & 0x2D, value >> 8 & 7, b"\x82" * (value >> 12 & 15))
    frames.insert(at, made)


Fault = Callable[[list[bytes], int, int], None]
FAULTS: list[Fault] = [
    drop,
    duplicate,
    move,
    flip,
    change_flags,
    change_stream,
    change_type,
    truncate,
    falsify_length,
    insert,
]
faults = st.lists(
    st.tuples(st.sampled_from(FAULTS), st.integers(0, 1000), st.integers(0, 2**16 - 1)), max_size=3
)


def packets(data: bytes, ends: list[int]) -> list[bytes]:
    """Cuts ``data`` into packets at ``ends``."""
    bounds = [0, *sorted(end % (len(data) + 1) for end in ends), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds) if a < b]
