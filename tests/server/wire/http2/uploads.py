"""Helpers of the flow-control tests: uploading clients, and checks of the upload budget."""

from hyperframe.frame import Frame, WindowUpdateFrame
from server.wire.http2.peer import Peer, RecordingHandler, data, of

from embedserve.wire.http2.inbound_flow_control import STREAM_WINDOW
from embedserve.wire.http2.upload_budget import UploadBudget

FRAME_BYTES = 16384


def window_increments(frames: list[Frame], stream_id: int) -> int:
    """Returns the bytes of window that ``frames`` add."""
    return sum(
        one.window_increment for one in of(frames, WindowUpdateFrame) if one.stream_id == stream_id
    )


def send_body(peer: Peer, stream_id: int, nbytes: int) -> list[Frame]:
    """Sends ``nbytes`` of a body, in full frames as far as possible."""
    frames = [data(stream_id, bytes(FRAME_BYTES))] * (nbytes // FRAME_BYTES)
    if nbytes % FRAME_BYTES:
        frames.append(data(stream_id, bytes(nbytes % FRAME_BYTES)))
    return peer.send(*frames)


def client_awaiting_grant(uploads: UploadBudget) -> Peer:
    """Returns a client that has sent a window's bytes and waits to send a megabyte more."""
    peer = Peer(uploads=uploads)
    peer.holds_bodies = True
    handler = peer.open(1, is_end=False)
    send_body(peer, 1, STREAM_WINDOW)
    peer.take()
    handler.stream.expect(1 << 20)
    return peer


def fill_streams(peer: Peer, count: int) -> list[RecordingHandler]:
    """Returns handlers of ``count`` open streams that each hold a window's bytes."""
    peer.holds_bodies = True
    first = peer.connection.next_id
    handlers = [peer.open(first + 2 * i, is_end=False) for i in range(count)]
    for handler in handlers:
        assert peer.connection.flow_control.window >= STREAM_WINDOW, "the connection is stuck"
        send_body(peer, handler.stream.id, STREAM_WINDOW)
    return handlers


def is_budget_free(uploads: UploadBudget, bytes_max: int) -> bool:
    """Checks that nothing is outstanding: the whole budget is granted immediately."""
    granted: list[int] = []

    def decline(nbytes: int) -> bool:
        granted.append(nbytes)
        return False  # the grant is declined, and so the budget stays whole

    uploads.request(bytes_max, decline, lambda: True)
    return granted == [bytes_max]
