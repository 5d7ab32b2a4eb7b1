"""Tests of the server's HTTP/2 against libnghttp2: both read the same bytes of a client.

The tests compare the requests, with their headers and bodies: which have ended, and which the
client reset. They also compare the acknowledgements, the streams that the server reset, whether it
closed the connection, and the codes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hostile import frames as f
from hostile import nghttp2, scripts
from hostile.scripts import Script
from hostile.trace import Request, Settings, Trace
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from embedserve.wire.http2.connection import Http2Connection
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.inbound_flow_control import STREAM_WINDOW
from embedserve.wire.http2.request_headers import ResolvedRoute, read_request
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http2.upload_budget import UploadBudget
from embedserve.wire.http_stream import Handler
from embedserve.wire.response_date import ResponseDate

OUR_SETTINGS: Settings = [
    (f.MAX_CONCURRENT_STREAMS, 128),
    (f.INITIAL_WINDOW_SIZE, STREAM_WINDOW),
    (f.MAX_HEADER_LIST_SIZE, 16_384),
]
EXAMPLES = 120
NO_CONTENT = encode([(b":status", b"204")])
LIBRARY = nghttp2.load()

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="there is no libnghttp2.so.14")


class Recorder(Handler):
    """The handler of one stream: records its events, and responds if ``responds`` is set."""

    def __init__(self, trace: Trace, request: Request, stream: Stream, responds: bool) -> None:
        self._trace = trace
        self._request = request
        self._stream = stream
        self._responds = responds

    def receive(self, data: bytes, is_end: bool) -> None:
        self._request.body += data
        self._request.has_ended |= is_end
        self._stream.consumed(len(data))
        if is_end and self._responds:
            self._stream.send_head(NO_CONTENT, is_end=True)

    def reset(self) -> None:
        """Records a reset. The connection also calls this for streams that end with it, and for
        failed streams.
        """
        if not self._stream.connection.is_over:
            self._request.was_reset = True


class Ours:
    """The server's connection, with the interface of `Nghttp2`."""

    def __init__(self, responds: bool) -> None:
        self.trace = Trace()
        self._responds = responds
        uploads = UploadBudget(1 << 20, lambda: True)
        self._connection = Http2Connection(
            self._open_request, uploads, lambda: None, ResponseDate()
        )
        self._send()

    def _open_request(self, fields: list[f.Header]) -> ResolvedRoute | str:
        request = read_request(fields)
        if isinstance(request, str):
            return request

        def open_recorder(stream: Stream) -> Recorder:
            recorded = self.trace.requests[stream.id] = Request(fields)
            return Recorder(self.trace, recorded, stream, self._responds)

        return ResolvedRoute(open_recorder, request.content_length)

    def receive(self, data: bytes) -> None:
        self._connection.receive(data)
        self._send()
        while self._connection.has_more:
            self._connection.receive(b"")
            self._send()

    def _send(self) -> None:
        self.trace.sent(b"".join(self._connection.frame_writer.out))
        self._connection.frame_writer.out.clear()


def run_both(data: bytes, ends: list[int], responds: bool) -> tuple[Trace, Trace]:
    """Returns the traces of the server and of the library for ``data``, cut at ``ends``.

    The library sends nothing while it processes its input. It gets one frame at a time, since its
    responses would otherwise come later than ours.
    """
    assert LIBRARY is not None
    ours, theirs = Ours(responds), nghttp2.Nghttp2(LIBRARY, OUR_SETTINGS, responds)
    try:
        for packet in scripts.packets(data[len(f.PREFACE) :], ends):
            ours.receive(packet)
        for packet in scripts.packets(data, scripts.frame_ends(data)):
            theirs.receive(packet)
    finally:
        theirs.close()
    return ours.trace, theirs.trace


MALFORMED = {f.PROTOCOL_ERROR, f.FRAME_SIZE_ERROR, f.STREAM_CLOSED, f.COMPRESSION_ERROR}


def kind_of(code: int | None) -> str:
    """Returns the kind of a code. All codes for malformed input are one kind, as a frame may have
    several faults.
    """
    if code is None:
        return "nothing"
    return "malformed" if code in MALFORMED else str(code)


@dataclass
class Case:
    """The bytes that were sent, and the traces of both implementations."""

    data: bytes
    ours: Trace
    theirs: Trace

    @property
    def frames(self) -> list[f.Frame]:
        """The whole frames of the bytes."""
        return f.take_frames(bytearray(self.data[len(f.PREFACE) :]))

    def only_one_ended(self) -> str:
        """Returns which implementation ended the connection, if only one did."""
        ends = self.ours.goaway_code is not None, self.theirs.goaway_code is not None
        return {(True, False): "ours", (False, True): "theirs"}.get(ends, "")


def is_cut_off(case: Case) -> bool:
    """Checks for bytes that end within a frame or a header block. The library judges an incomplete
    frame; our server waits for the rest.
    """
    frames = case.frames
    blocks = [one for one in frames if one.type in (f.HEADERS, f.CONTINUATION)]
    size = len(f.PREFACE) + sum(9 + len(one.payload) for one in frames)
    return size < len(case.data) or (blocks != [] and not blocks[-1].flags & f.END_HEADERS)


def goes_backwards(case: Case) -> bool:
    """Checks for a stream id below the newest: a PROTOCOL_ERROR by RFC 9113, 5.1.1. The library
    ignores it.
    """
    opened = [one.stream for one in case.frames if one.type == f.HEADERS]
    return case.only_one_ended() == "ours" and opened != sorted(opened)


def has_a_wrong_priority(case: Case) -> bool:
    """Checks for a PRIORITY that is not 5 bytes. By RFC 9113, 6.3, it ends its stream; the library
    ends the connection.
    """
    found = any(one.type == f.PRIORITY and len(one.payload) != 5 for one in case.frames)
    return found and case.theirs.goaway_code == f.FRAME_SIZE_ERROR


def has_settings_of_extensions(case: Case) -> bool:
    """Checks for settings of RFC 8441 and RFC 9218, for which the library rejects some values."""
    numbers = {
        int.from_bytes(one.payload[i : i + 2], "big")
        for one in case.frames
        if one.type == f.SETTINGS
        for i in range(0, len(one.payload), 6)
    }
    return not numbers.isdisjoint({8, 9}) and case.only_one_ended() == "theirs"


def has_no_authority(case: Case) -> bool:
    """Checks for a request without :authority and host, which RFC 9113, 8.3.1, permits."""
    return any(
        not {b":authority", b"host"}.intersection(dict(request.fields))
        and case.theirs.reset_codes.get(stream) == f.PROTOCOL_ERROR
        for stream, request in case.ours.requests.items()
    )


def has_odd_trailers(case: Case) -> bool:
    """Checks for invalid trailers. No code reads trailers, so our server checks only their names;
    the library checks values, too.
    """
    opened = [one.stream for one in case.frames if one.type == f.HEADERS]
    return any(
        opened.count(stream) > 1 and case.ours.reset_codes.get(stream) is None
        for stream, code in case.theirs.reset_codes.items()
        if code == f.PROTOCOL_ERROR
    )


def repeats_its_length(case: Case) -> bool:
    """Checks for a repeated content-length of one value; RFC 9110, 8.6, lets a server accept it."""
    return any(
        [name for name, _ in request.fields].count(b"content-length") > 1
        for request in case.ours.requests.values()
    )


PERMITTED_DIFFERENCES = [
    is_cut_off,
    goes_backwards,
    has_a_wrong_priority,
    has_settings_of_extensions,
    has_no_authority,
    has_odd_trailers,
    repeats_its_length,
]
"""Permitted differences, with the reasons in their docstrings."""


def check(data: bytes, ours: Trace, theirs: Trace) -> None:
    found = list(differences(ours, theirs))
    case = Case(data, ours, theirs)
    if found and not any(is_permitted(case) for is_permitted in PERMITTED_DIFFERENCES):
        pytest.fail(f"{found} of {scripts.split_frames(data[len(f.PREFACE) :])}")


def differences(ours: Trace, theirs: Trace) -> Iterator[str]:
    """Yields the differences in words, ours first. Events after only one connection ended are not
    compared.
    """
    ends = kind_of(ours.goaway_code), kind_of(theirs.goaway_code)
    if ends[0] != ends[1]:
        yield f"GOAWAY: {ends[0]}, {ends[1]}"
        return
    for stream in sorted({*ours.requests, *theirs.requests}):
        one, other = ours.requests.get(stream), theirs.requests.get(stream)
        for name in ("fields", "body", "has_ended", "was_reset"):
            values = getattr(one, name, None), getattr(other, name, None)
            # Our handler's `reset` is also called for our own resets.
            is_own_reset = name == "was_reset" and stream in ours.reset_codes
            if values[0] != values[1] and not is_own_reset:
                yield f"{name}: {values[0]}, {values[1]}"
    for stream in sorted({*ours.reset_codes, *theirs.reset_codes}):
        codes = (kind_of(one.reset_codes.get(stream)) for one in (ours, theirs))
        if len({*codes}) > 1:
            yield f"RST_STREAM: {ours.reset_codes.get(stream)}, {theirs.reset_codes.get(stream)}"
    if ours.goaway_code is None:
        if ours.pongs != theirs.pongs:
            yield f"PING: {ours.pongs}, {theirs.pongs}"
        if ours.settings_acks != theirs.settings_acks:
            yield f"SETTINGS: {ours.settings_acks}, {theirs.settings_acks}"


Operations = list[scripts.Operation]
Faults = list[tuple[scripts.Fault, int, int]]


def frames_sent_by(operations: Operations, faults: Faults) -> bytes:
    script = Script(f.settings(*OUR_SETTINGS))
    for operation in operations:
        script.do(operation)
    for fault, at, value in faults:
        if script.frames:
            fault(script.frames, at % len(script.frames), value)
    return f.PREFACE + b"".join(script.frames)


BOUNDED = settings(
    max_examples=EXAMPLES,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
many_operations = st.lists(scripts.operations, min_size=3, max_size=25)
malformed_operations = st.lists(
    st.one_of(scripts.operations, scripts.wrong_opens, scripts.wrong_trailers),
    min_size=3,
    max_size=15,
)
cuts = st.lists(st.integers(0, 4000), max_size=6)


@BOUNDED
@given(operations=many_operations, ends=cuts, responds=st.booleans())
def test_valid_frames_are_read_as_by_nghttp2(
    operations: Operations, ends: list[int], responds: bool
) -> None:
    """Checks that both implementations read valid clients alike, and reject none."""
    data = frames_sent_by(operations, [])
    ours, theirs = run_both(data, ends, responds)
    event(f"{len(theirs.requests)} requests")
    assert list(differences(ours, theirs)) == []
    assert (ours.goaway_code, ours.reset_codes) == (None, {})


@BOUNDED
@given(operations=malformed_operations, ends=cuts, responds=st.booleans())
def test_malformed_requests_are_handled_as_by_nghttp2(
    operations: Operations, ends: list[int], responds: bool
) -> None:
    data = frames_sent_by(operations, [])
    ours, theirs = run_both(data, ends, responds)
    event(f"resets {len(theirs.reset_codes)}")
    check(data, ours, theirs)


@BOUNDED
@given(operations=many_operations, faults=scripts.faults, ends=cuts, responds=st.booleans())
def test_faulty_frames_are_handled_as_by_nghttp2(
    operations: Operations, faults: Faults, ends: list[int], responds: bool
) -> None:
    data = frames_sent_by(operations, faults)
    ours, theirs = run_both(data, ends, responds)
    event(f"GOAWAY {theirs.goaway_code}, resets {sorted(set(theirs.reset_codes.values()))}")
    check(data, ours, theirs)
