"""Tests of inbound flow control: receive windows, their updates, and grants for large bodies."""

from __future__ import annotations

from time import perf_counter

import pytest
from hyperframe.frame import Frame, RstStreamFrame, SettingsFrame, WindowUpdateFrame
from server.wire.http2.peer import (
    Peer,
    RecordingHandler,
    data,
    expect_end,
    has_ended,
    of,
    resets,
)

from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.inbound_flow_control import (
    CONNECTION_WINDOW,
    NARROW_S,
    NARROW_STREAM_WINDOW,
    STREAM_WINDOW,
    UNACKNOWLEDGED_MAX,
)
from embedserve.wire.http2.upload_budget import UploadBudget

FRAME = 16384
INITIAL_WINDOW_SIZE = SettingsFrame.INITIAL_WINDOW_SIZE


class Gate:
    """A switch that tells whether uploads are admitted."""

    def __init__(self) -> None:
        self.is_open = True

    def __call__(self) -> bool:
        return self.is_open


def given(frames: list[Frame], stream_id: int) -> int:
    """Returns the bytes of window that ``frames`` add."""
    return sum(
        one.window_increment for one in of(frames, WindowUpdateFrame) if one.stream_id == stream_id
    )


def send(peer: Peer, stream_id: int, nbytes: int) -> list[Frame]:
    """Sends ``nbytes`` of a body, in full frames as far as possible."""
    frames = [data(stream_id, bytes(FRAME))] * (nbytes // FRAME)
    if nbytes % FRAME:
        frames.append(data(stream_id, bytes(nbytes % FRAME)))
    return peer.send(*frames)


def test_a_stream_may_send_its_window_and_no_byte_more() -> None:
    peer = Peer()
    peer.holds = True
    handler = peer.open(1, is_end=False)
    neighbour = peer.open(3, is_end=False)
    assert resets(send(peer, 1, STREAM_WINDOW)) == []
    assert resets(send(peer, 1, 1)) == [(1, ErrorCode.FLOW_CONTROL_ERROR)]
    assert (len(handler.body), handler.resets, neighbour.resets) == (STREAM_WINDOW, 1, 0)


def test_the_connection_may_send_its_window_and_no_byte_more() -> None:
    peer = Peer(uploads=UploadBudget(1 << 30, lambda: False))
    peer.holds = True
    *numbers, last = range(1, 2 * CONNECTION_WINDOW // STREAM_WINDOW + 2, 2)
    for number in (*numbers, last):
        peer.open(number, is_end=False)
    answered = []
    for number in numbers:
        answered += send(peer, number, STREAM_WINDOW)
    assert given(answered, 0) == 0
    assert not peer.connection.is_over
    expect_end(peer, send(peer, last, 1), ErrorCode.FLOW_CONTROL_ERROR)


@pytest.mark.parametrize("padding", [0, 255])
def test_padding_takes_window_and_gives_the_connections_back(padding: int) -> None:
    """Checks RFC 9113, section 6.1: the whole payload counts, with its padding."""
    peer = Peer()
    handler = peer.open(1, is_end=False)
    answered = peer.send(*[data(1, b"", padding=padding)] * 10)
    assert handler.stream.receive_window == STREAM_WINDOW - 10 * (padding + 1)
    assert handler.stream.held_bytes == 0
    before = given(peer.first, 0) + 65535
    for i in range(1, 200):
        number = 2 * i + 1
        peer.send(peer.headers(number, is_end=False))
        answered += peer.send(*[data(number, b"x" * 10_000, padding=255)] * 5)
        answered += peer.send(data(number, b"", is_end=True))
        peer.handlers[number].stream.send_head(b"", is_end=True)
        peer.take()
    sent = 10 * (padding + 1) + 199 * 5 * 10_256
    assert sent - CONNECTION_WINDOW // 2 < given(answered, 0) <= sent
    assert before == CONNECTION_WINDOW


def test_what_is_consumed_is_given_back_before_the_window_ends() -> None:
    peer = Peer()
    handler = peer.open(1, is_end=False)
    answered = []
    for _ in range(100):
        answered += send(peer, 1, 5 * FRAME)
    assert len(handler.body) == 500 * FRAME
    sent = 500 * FRAME
    assert sent - STREAM_WINDOW < given(answered, 1) <= sent
    assert sent - CONNECTION_WINDOW < given(answered, 0) <= sent
    assert not peer.connection.is_over


def test_what_a_stream_that_ended_held_is_given_back() -> None:
    peer = Peer(uploads=UploadBudget(1 << 30, lambda: False))
    peer.holds = True
    answered = []
    for i in range(20):
        number = 2 * i + 1
        peer.open(number, is_end=False)
        answered += send(peer, number, STREAM_WINDOW)
        answered += peer.send(RstStreamFrame(number, error_code=8))
    assert given(answered, 0) >= 20 * STREAM_WINDOW - CONNECTION_WINDOW
    assert not peer.connection.is_over


def test_data_on_streams_that_ended_counts_for_the_connection_alone() -> None:
    peer = Peer()
    handler = peer.open(1, is_end=False)
    handler.stream.send_head(b"", is_end=True)  # which resets the rest of the request
    peer.take()
    answered = []
    for _ in range(10):
        answered += send(peer, 1, 8 * FRAME)
    assert given(answered, 0) > 80 * FRAME - CONNECTION_WINDOW
    assert not peer.connection.is_over


def test_a_body_larger_than_the_window_is_granted_what_it_needs() -> None:
    gate = Gate()
    peer = Peer(uploads=UploadBudget(8 << 20, gate))
    peer.holds = True
    handler = peer.open(1, is_end=False)
    size = 5 << 20
    answered = []
    while missing := size - len(handler.body):
        handler.stream.expect(missing)
        answered += peer.take()
        window, has = handler.stream.receive_window, len(handler.body)
        # A step is as large as the body so far, and is requested when half of a step is left.
        assert 0 < window <= 1.5 * max(has, STREAM_WINDOW)
        answered += send(peer, 1, min(FRAME, window))
    assert given(answered, 1) == size - STREAM_WINDOW
    assert given(answered, 0) >= size - CONNECTION_WINDOW
    assert not peer.connection.is_over
    assert resets(send(peer, 1, 1)) == [(1, ErrorCode.FLOW_CONTROL_ERROR)]


def test_what_fits_into_the_window_is_not_asked_for() -> None:
    peer = Peer(uploads=UploadBudget(1, lambda: True))
    handler = peer.open(1, is_end=False)
    handler.stream.expect(STREAM_WINDOW)
    assert peer.take() == []


def test_while_the_queue_is_full_a_large_body_is_granted_nothing() -> None:
    gate = Gate()
    uploads = UploadBudget(8 << 20, gate)
    peer = Peer(uploads=uploads)
    peer.holds = True
    handler = peer.open(1, is_end=False)
    gate.is_open = False
    answered = send(peer, 1, STREAM_WINDOW)
    handler.stream.expect(1 << 20)
    assert given([*answered, *peer.take()], 1) == 0
    gate.is_open = True
    uploads.retry()
    assert given(peer.take(), 1) == STREAM_WINDOW


def test_connections_are_granted_in_turn_and_give_back_as_streams_end() -> None:
    uploads = UploadBudget(STREAM_WINDOW, lambda: True)
    peers = [wanting(uploads) for _ in range(3)]
    assert [given(peer.take(), 1) for peer in peers] == [STREAM_WINDOW, 0, 0]
    peers[1].send(RstStreamFrame(1, error_code=8))
    assert [given(peer.take(), 1) for peer in peers] == [0, 0, 0]
    peers[0].send(RstStreamFrame(1, error_code=8))
    # The second client has reset its stream.
    assert [given(peer.take(), 1) for peer in peers] == [0, 0, STREAM_WINDOW]
    peers[2].connection.close()
    assert given(wanting(uploads).take(), 1) == STREAM_WINDOW


def wanting(uploads: UploadBudget) -> Peer:
    """Returns a client that has sent a window's bytes and waits to send a megabyte more."""
    peer = Peer(uploads=uploads)
    peer.holds = True
    handler = peer.open(1, is_end=False)
    send(peer, 1, STREAM_WINDOW)
    peer.take()
    handler.stream.expect(1 << 20)
    return peer


def test_a_grant_is_given_back_once_all_has_come() -> None:
    uploads = UploadBudget(STREAM_WINDOW, lambda: True)
    first, second = wanting(uploads), wanting(uploads)
    first.take()
    assert given(second.take(), 1) == 0
    first.send(data(1, bytes(STREAM_WINDOW // 32), is_end=True))
    stream = first.handlers[1].stream
    stream.consumed(stream.held_bytes)
    assert given(second.take(), 1) == STREAM_WINDOW


def test_a_grant_is_given_back_as_messages_of_a_stream_are_consumed() -> None:
    """Checks that the second large message of a stream does not wait forever."""
    uploads = UploadBudget(STREAM_WINDOW, lambda: True)
    peer = wanting(uploads)
    stream = peer.handlers[1].stream
    for _ in range(3):
        assert stream.granted_bytes == STREAM_WINDOW
        send(peer, 1, STREAM_WINDOW)
        stream.consumed(stream.held_bytes)
        assert stream.granted_bytes == 0
        assert stream.receive_window >= STREAM_WINDOW // 2
        send(peer, 1, stream.receive_window)
        stream.expect(1 << 20)


def test_bodies_that_all_have_begun_do_not_wait_for_each_other_for_ever() -> None:
    """Opens streams that each hold a part of a body; none can end in the connection's window."""
    peer = Peer()
    peer.holds = True
    for number in range(1, 21, 2):
        peer.open(number, is_end=False)
    answered: list[Frame] = []
    window = CONNECTION_WINDOW
    for number in range(1, 21, 2):
        for _ in range(STREAM_WINDOW // FRAME):
            assert window >= FRAME, "the connection is stuck"
            window -= FRAME
            answered = send(peer, number, FRAME)
            window += given(answered, 0)
    for number in range(1, 21, 2):
        assert len(peer.handlers[number].body) == STREAM_WINDOW
    assert not peer.connection.is_over


def test_room_that_comes_later_is_told_at_once() -> None:
    """Checks for an immediate update: a waiting client sends nothing that would trigger a write."""
    gate = Gate()
    uploads = UploadBudget(8 << 20, gate)
    peer = Peer(uploads=uploads)
    peer.holds = True
    gate.is_open = False
    for number in range(1, 2 * CONNECTION_WINDOW // STREAM_WINDOW, 2):
        peer.open(number, is_end=False)
        send(peer, number, STREAM_WINDOW)
    before = peer.outputs
    gate.is_open = True
    uploads.retry()
    assert peer.outputs > before
    assert given(peer.take(), 0) >= STREAM_WINDOW


def filled(peer: Peer, count: int) -> list[RecordingHandler]:
    """Returns handlers of ``count`` open streams that each hold a window's bytes."""
    peer.holds = True
    first = peer.connection.next_id
    handlers = [peer.open(first + 2 * i, is_end=False) for i in range(count)]
    for handler in handlers:
        assert peer.connection.flow_control.window >= STREAM_WINDOW, "the connection is stuck"
        send(peer, handler.stream.id, STREAM_WINDOW)
    return handlers


def end(peer: Peer, handlers: list[RecordingHandler]) -> None:
    """Ends the requests of ``handlers``, which consume their held bytes and respond."""
    for handler in handlers:
        peer.send(data(handler.stream.id, b"", is_end=True))
        handler.stream.consumed(handler.stream.held_bytes)
        handler.stream.send_head(b"", is_end=True)
    peer.take()


def is_whole(uploads: UploadBudget, bytes_max: int) -> bool:
    """Checks that nothing is outstanding: the whole budget is granted immediately."""
    granted: list[int] = []

    def look(nbytes: int) -> bool:
        granted.append(nbytes)
        return False  # the grant is declined, and so the budget stays whole

    uploads.request(bytes_max, look)
    return granted == [bytes_max]


def test_a_connection_that_is_idle_keeps_nothing_of_the_budget() -> None:
    """Checks that idle connections hold no budget; else large bodies on all connections wait."""
    bytes_max = 16 << 20
    uploads = UploadBudget(bytes_max, lambda: True)
    peers = [Peer(uploads=uploads) for _ in range(2)]
    for peer in peers * 3:
        end(peer, filled(peer, 40))
        assert peer.connection.streams == {}
        assert is_whole(uploads, bytes_max)
    assert not any(peer.connection.is_over for peer in peers)


def test_what_a_connection_gives_back_goes_to_a_body_that_waits() -> None:
    uploads = UploadBudget(CONNECTION_WINDOW, lambda: True)
    busy = Peer(uploads=uploads)
    handlers = filled(busy, 12)
    waiting = wanting(uploads)
    assert given(waiting.take(), 1) == 0
    end(busy, handlers)
    assert given(waiting.take(), 1) == STREAM_WINDOW


def test_room_that_comes_once_all_is_consumed_is_not_kept() -> None:
    gate = Gate()
    uploads = UploadBudget(8 << 20, gate)
    peer = Peer(uploads=uploads)
    gate.is_open = False
    handlers = filled(peer, CONNECTION_WINDOW // STREAM_WINDOW)
    for handler in handlers:
        handler.stream.consumed(handler.stream.held_bytes)
    assert peer.connection.flow_control.window < FRAME
    peer.take()
    gate.is_open = True
    uploads.retry()
    assert given(peer.take(), 0) == CONNECTION_WINDOW
    assert is_whole(uploads, 8 << 20)


def test_the_window_does_not_grow_by_what_is_given_back_later() -> None:
    """Checks the window: the client would keep the excess, and could exceed the budget by it."""
    peer = Peer()
    handlers = filled(peer, 80)
    for handler in handlers[5:]:  # the others still hold more than half of the usual window
        handler.stream.consumed(handler.stream.held_bytes)
    filled(peer, 8)
    assert CONNECTION_WINDOW // 2 < peer.connection.flow_control.window <= CONNECTION_WINDOW


def test_a_window_that_a_body_left_behind_may_be_filled_by_others() -> None:
    peer = Peer()
    peer.holds = True
    handler = peer.open(1, is_end=False)
    while len(handler.body) < 4 << 20:
        handler.stream.expect(16 << 20)
        send(peer, 1, FRAME)
    peer.send(RstStreamFrame(1, error_code=8))
    left_bytes = peer.connection.flow_control.window
    assert left_bytes > 2 * CONNECTION_WINDOW
    filled(peer, left_bytes // STREAM_WINDOW + 8)


def settings_windows(frames: list[Frame]) -> list[int]:
    """Returns the initial stream windows that ``frames`` announce."""
    announced = (one.settings.get(INITIAL_WINDOW_SIZE) for one in of(frames, SettingsFrame))
    return [window for window in announced if window is not None]


def acknowledgement() -> Frame:
    return SettingsFrame(0, flags=["ACK"])


def narrowed(uploads: UploadBudget | None = None) -> Peer:
    """Returns a client that was rejected for a full queue, and has received the smaller window."""
    peer = Peer(uploads=uploads)
    peer.holds = True
    peer.send(acknowledgement())
    peer.open(1).stream.keep_bodies_back()
    assert settings_windows(peer.take()) == [NARROW_STREAM_WINDOW]
    return peer


def test_a_refused_client_begins_with_little_once_it_knows() -> None:
    peer = narrowed()
    peer.open(3, is_end=False)
    assert resets(send(peer, 3, STREAM_WINDOW)) == []  # which was sent before it knew
    peer.send(acknowledgement())
    peer.open(5, is_end=False)
    assert resets(send(peer, 5, NARROW_STREAM_WINDOW)) == []
    assert resets(send(peer, 5, 1)) == [(5, ErrorCode.FLOW_CONTROL_ERROR)]


@pytest.mark.parametrize("nbytes", [NARROW_STREAM_WINDOW, NARROW_STREAM_WINDOW + 1])
def test_what_a_refused_client_sends_whole_is_little_too(nbytes: int) -> None:
    peer = narrowed()
    peer.send(acknowledgement())
    is_refused = nbytes > NARROW_STREAM_WINDOW
    for number in (3, 5):
        frames = peer.send(
            peer.headers(number, is_end=False), data(number, bytes(nbytes), is_end=True)
        )
        assert resets(frames) == [(number, ErrorCode.FLOW_CONTROL_ERROR)] * is_refused
        assert peer.handlers[number].is_whole is not is_refused


def test_streams_that_are_open_as_it_takes_note_lose_as_much() -> None:
    peer = narrowed()
    peer.open(3, is_end=False)
    send(peer, 3, FRAME)
    peer.send(acknowledgement())
    stream = peer.handlers[3].stream
    assert stream.receive_window == NARROW_STREAM_WINDOW - FRAME
    stream.expect(3 * FRAME)
    assert given(peer.take(), 3) == 4 * FRAME - NARROW_STREAM_WINDOW
    assert resets(send(peer, 3, 3 * FRAME)) == []
    assert len(peer.handlers[3].body) == 4 * FRAME


def test_a_body_that_was_kept_back_is_let_in_as_there_is_room() -> None:
    gate = Gate()
    uploads = UploadBudget(1 << 20, gate)
    peer = narrowed(uploads)
    peer.send(acknowledgement())
    gate.is_open = False
    peer.open(3, is_end=False)
    send(peer, 3, NARROW_STREAM_WINDOW)
    peer.handlers[3].stream.expect(100_000)
    assert given(peer.take(), 3) == 0
    gate.is_open = True
    uploads.retry()
    assert given(peer.take(), 3) == 100_000


@pytest.mark.parametrize("end", [b"rest", b"", None], ids=["data", "no data", "trailers"])
def test_a_grant_to_a_body_that_began_with_an_empty_frame_is_given_back(end: bytes | None) -> None:
    """Checks a request that ends without held bytes, as most requests without a grant do."""
    bytes_max = 1 << 20
    uploads = UploadBudget(bytes_max, lambda: True)
    peer = narrowed(uploads)
    peer.send(acknowledgement())
    for number in (3, 5):  # the first response of a connection is written another way
        stream = peer.open(number, is_end=False).stream
        peer.send(data(number, b""))
        stream.expect(100_000)
        assert stream.granted_bytes > 0
        if end is None:
            peer.send(peer.headers(number, [(b"trailer", b"1")]))
        else:
            peer.send(data(number, end, is_end=True))
        stream.answer(encode([(b":status", b"200")]), (b"x",), 1, b"")
        assert has_ended(peer.take(), number)
        assert is_whole(uploads, bytes_max)


def test_it_is_told_once_and_told_again_when_it_was_not_refused_for_a_while() -> None:
    peer = narrowed()
    stream = peer.handlers[1].stream
    stream.keep_bodies_back()
    assert settings_windows(peer.take()) == []
    peer.send(acknowledgement())
    peer.connection.check_time(0.0)
    assert settings_windows(peer.take()) == []
    for _ in range(2):
        peer.connection.check_time(perf_counter() + NARROW_S)
    assert settings_windows(peer.take()) == [STREAM_WINDOW]
    peer.send(acknowledgement())
    peer.open(5, is_end=False)
    assert resets(send(peer, 5, STREAM_WINDOW)) == []


def test_acknowledgements_of_nothing_change_nothing() -> None:
    peer = narrowed()
    peer.send(*[acknowledgement()] * 5)
    assert peer.connection.flow_control.stream_window == NARROW_STREAM_WINDOW
    assert not peer.connection.is_over


def test_who_acknowledges_nothing_is_sent_no_more_settings() -> None:
    peer = Peer()
    stream = peer.open(1).stream
    sent = []
    for _ in range(100):
        stream.keep_bodies_back()
        peer.connection.check_time(perf_counter() + 2 * NARROW_S)
        sent += settings_windows(peer.take())
    assert len(sent) < UNACKNOWLEDGED_MAX
    for _ in range(UNACKNOWLEDGED_MAX):
        peer.send(acknowledgement())
    assert peer.connection.flow_control.stream_window == sent[-1]
    peer.connection.check_time(perf_counter() + 2 * NARROW_S)
    stream.keep_bodies_back()
    assert settings_windows(peer.take()) == [STREAM_WINDOW, NARROW_STREAM_WINDOW]


def test_an_empty_frame_ends_a_body_whose_window_was_lowered_below_zero() -> None:
    """Checks RFC 9113, section 6.9.1: an empty frame with END_STREAM needs no window."""
    peer = narrowed()
    handler = peer.open(3, is_end=False)
    send(peer, 3, 60_000)
    peer.send(acknowledgement())
    assert handler.stream.receive_window == NARROW_STREAM_WINDOW - 60_000
    assert resets(peer.send(data(3, b"", is_end=True))) == []
    assert (handler.is_whole, len(handler.body)) == (True, 60_000)
