"""Tests of very many small concurrent management requests: they wait in a queue.

Without the queue the event loop handled all of them before any other request.
"""

import pytest
from hostile import frames as f
from hostile.conftest import MakePeer

from embedserve.wire.http2.control import STREAMS_MAX

CONNECTIONS = 12
STREAMS = range(1, 2 * STREAMS_MAX, 2)


@pytest.mark.parametrize("path", [b"/metrics", b"/models"])
@pytest.mark.growth(96 << 10)
def test_burst_of_management_requests_on_every_stream_is_answered(
    rest_peer: MakePeer, path: bytes
) -> None:
    """Allows memory for responses that this process reads more slowly than they are produced."""
    burst = b"".join(f.get(stream, path) for stream in STREAMS)
    peers = [rest_peer() for _ in range(CONNECTIONS)]
    for peer in peers:
        peer.send(burst, reads=False)
    for peer in peers:
        assert {peer.response(stream).status for stream in STREAMS} == {200}


def test_burst_of_reset_management_requests_gets_no_responses(rest_peer: MakePeer) -> None:
    """Checks that no request runs, and that each reset makes room for another request.

    The resets are within the connection's token bucket.
    """
    burst = b"".join(f.get(stream, b"/metrics") + f.rst_stream(stream) for stream in STREAMS)
    peers = [rest_peer() for _ in range(CONNECTIONS)]
    for peer in peers:
        peer.send(burst, reads=False)
    for peer in peers:
        peer.pong()
        assert not peer.responses
