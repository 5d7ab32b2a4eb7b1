"""Tests of invalid prefaces and frames: how each ends its connection or its stream."""

import pytest
from hostile import frames as f
from hostile.conftest import MakePeer
from hostile.frames import FRAME_SIZE_ERROR, PROTOCOL_ERROR, SETTINGS_TIMEOUT


def test_client_goaway_does_not_stop_responses_in_flight(rest_peer: MakePeer) -> None:
    """Checks that a client's GOAWAY, which concerns streams that the server opens, does not stop
    responses on the client's own streams.
    """
    peer = rest_peer()
    peer.send(f.get(1) + f.goaway() + f.get(3))
    assert peer.response(1).status == 200
    peer.read_for(0.2)
    peer.send(f.goaway() * 50 + f.get(5))
    peer.read_until(lambda: 5 in peer.responses and peer.responses[5].is_whole, "answer or end")
    assert peer.is_closed or peer.responses[5].status == 200


def test_garbage_after_a_valid_request_ends_the_connection(rest_peer: MakePeer) -> None:
    peer = rest_peer()
    peer.send(f.get(1))
    assert peer.response(1).status == 200
    peer.send(bytes(i * 37 & 0xFF for i in range(100_000)))
    assert peer.ending() in (FRAME_SIZE_ERROR, PROTOCOL_ERROR)


@pytest.mark.parametrize(
    "greeting",
    [
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\rX",
        b"PRI /",
        b"\0" * 1000,
    ],
    ids=["not SM", "one byte wrong", "another path", "zeros"],
)
def test_invalid_preface_closes_the_connection(greeting: bytes, rest_peer: MakePeer) -> None:
    """Checks that the bytes count as invalid HTTP/1.1: a response 400 at most, then a close."""
    peer = rest_peer(greeting=greeting + b"\r\n\r\n", acknowledges=False)
    peer.ending()


def test_endless_preface_is_not_read_without_bound(rest_peer: MakePeer) -> None:
    """Checks that the memory for an HTTP/1.1 header section without end is bounded."""
    peer = rest_peer(greeting=b"PRI * HTTP/1.1\r\n", acknowledges=False)
    line = b"a: " + b"b" * 1000 + b"\r\n"
    # More than a connection discards while it closes (64 MiB), and more than the kernel's buffers.
    endless = line * 160_000
    assert peer.send(endless) < len(endless)


def test_request_sent_byte_by_byte_is_answered(rest_peer: MakePeer) -> None:
    """Sends each byte as a segment of its own, as far as the client can control that."""
    peer = rest_peer(greeting=b"", acknowledges=False)
    for byte in f.PREFACE + f.settings() + f.get(1):
        peer.send(bytes([byte]))
        peer.read_for(0.001)
    assert peer.response(1).status == 200


def test_partial_prefaces_hold_little_memory(rest_peer: MakePeer) -> None:
    """Opens 300 connections that send half a preface and nothing more."""
    for i in range(300):
        rest_peer(greeting=f.PREFACE[: i % 24], acknowledges=False)


@pytest.mark.soak
@pytest.mark.parametrize(
    "greeting", [b"", f.PREFACE[:20], b"GET / HTTP/1.1\r\nHost: a"], ids=["nothing", "PRI", "GET"]
)
def test_incomplete_start_of_a_connection_times_out(greeting: bytes, rest_peer: MakePeer) -> None:
    """Checks that the server closes the connection after 10 s."""
    peer = rest_peer(greeting=greeting, acknowledges=False)
    assert peer.ending() is None


@pytest.mark.soak
def test_connection_without_settings_times_out(rest_peer: MakePeer) -> None:
    peer = rest_peer(greeting=f.PREFACE, acknowledges=False)
    assert peer.ending() == SETTINGS_TIMEOUT
