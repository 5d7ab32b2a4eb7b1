"""Tests of random and mutated frames: nothing raises, and every call gets exactly one reply."""

from hypothesis import given
from hypothesis import strategies as st
from shard_client.shard_peer import (
    RESPONSE_HEADERS,
    ShardPeer,
    data,
    headers,
    response_frames,
    trailers,
)

from embedserve.wire.http2 import frames

ids = st.sampled_from([0, 1, 2, 3, 5, 7, 9, 2**31 - 1])
payloads = st.binary(max_size=40)
valid = st.one_of(
    st.builds(response_frames, ids, payloads, st.sampled_from([1, 3, 16384])),
    st.builds(lambda number: headers(number, RESPONSE_HEADERS), ids),
    st.builds(data, ids, payloads, st.sampled_from([0, 1, 8, 9])),
    st.builds(trailers, ids),
    st.builds(frames.rst_stream, ids, st.integers(0, 20)),
    st.builds(frames.window_update, ids, st.sampled_from([0, 1, 100, 2**31 - 1])),
    st.builds(frames.goaway, ids, st.integers(0, 20), st.text(max_size=5)),
    st.builds(frames.ping, st.binary(min_size=8, max_size=8)),
    st.builds(frames.settings, st.tuples(st.integers(1, 6), st.sampled_from([0, 1, 99, 20000]))),
)
unknown = st.builds(
    lambda kind, flags, number, payload: (
        frames.frame_header(len(payload), kind, flags, number) + payload
    ),
    st.integers(0, 12),
    st.integers(0, 255),
    ids,
    payloads,
)
mutations = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3)


@given(
    st.lists(st.one_of(valid, valid, unknown, st.just(b"call"), st.just(b"cancel")), max_size=12),
    mutations,
    st.integers(1, 200),
)
def test_mutated_frames_leave_each_call_with_exactly_one_reply(
    parts: list[bytes], changes: list[tuple[int, int]], step: int
) -> None:
    peer = ShardPeer()
    calls = {number: peer.call(b"x") for number in range(3)}
    cancelled = set()
    received = bytearray()
    for part in parts:
        if part == b"call" and not peer.client.is_draining:
            call = peer.call(b"y" * 10)
            calls[peer.calls - 1] = call
        elif part == b"cancel" and calls:
            number, call = calls.popitem()
            if number not in peer.replies:
                cancelled.add(number)
            call.cancel()
        else:
            received += part
        for position, value in changes:
            if position < len(received):
                received[position] = value
        if len(received) > step:
            peer.client.receive(bytes(received[:step]))
            del received[:step]
    peer.client.receive(bytes(received))
    peer.client.close("end")
    assert set(peer.replies) == set(range(peer.calls)) - cancelled
    assert peer.client.in_flight == 0


@given(st.binary(max_size=300))
def test_random_bytes_leave_the_call_with_a_reply(received: bytes) -> None:
    peer = ShardPeer()
    peer.call(b"x")
    peer.client.receive(received)
    peer.client.close("end")
    assert set(peer.replies) == {0}
