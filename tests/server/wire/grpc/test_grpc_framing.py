"""Tests of gRPC's framing, timeouts and status messages, and of the rejection of invalid bytes."""

import gzip
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.wire.grpc.grpc_peer import framed_compressed

from embedserve.wire.grpc import grpc_framing
from embedserve.wire.grpc.calls import only_message
from embedserve.wire.grpc.grpc_framing import (
    INLINE_MESSAGE_BYTES_MAX,
    Deframer,
    GrpcCallError,
    LargeMessage,
    framed,
    parse_timeout,
)

BYTES_MAX = 1000


def messages_of(deframer: Deframer, *chunks: bytes) -> list[bytes]:
    messages = []
    for chunk in chunks:
        deframer.feed(chunk)
        while (message := deframer.next_message()) is not None:
            assert isinstance(message, bytes)
            messages.append(message)
    return messages


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 400), max_size=8))
def test_messages_split_into_random_chunks_are_deframed(sent: list[bytes], cuts: list[int]) -> None:
    body = b"".join(framed(message) for message in sent)
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    chunks = [body[start:end] for start, end in pairwise(places)]
    deframer = Deframer(BYTES_MAX, b"identity")
    assert messages_of(deframer, *chunks) == sent
    deframer.check_end()
    assert deframer.nbytes == 0


def test_framed_joins_its_parts_into_one_message() -> None:
    assert framed(b"ab", memoryview(b"cdef").cast("H")) == b"\0\0\0\0\6abcdef"


def test_only_message_returns_the_single_complete_message() -> None:
    assert only_message(framed(b"abc"), 3) == b"abc"
    assert only_message(framed(b""), 3) == b""
    for other in (b"", b"\0\0", framed(b"abc")[:-1], framed(b"abc") + b"\0", framed(b"abcd")):
        assert only_message(other, 3) is None
    assert only_message(framed_compressed(b"abc"), 3) is None


@pytest.mark.parametrize(
    ("encoding", "compress"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)]
)
def test_compressed_and_plain_messages_may_be_mixed(encoding: bytes, compress: object) -> None:
    assert callable(compress)
    whole = b"a" * BYTES_MAX
    deframer = Deframer(BYTES_MAX, encoding)
    assert messages_of(deframer, framed_compressed(compress(whole)), framed(b"b")) == [whole, b"b"]


@pytest.mark.parametrize("nbytes", [BYTES_MAX + 1, 100 * BYTES_MAX])
def test_message_over_the_limit_after_decompression_is_rejected(nbytes: int) -> None:
    deframer = Deframer(BYTES_MAX, b"gzip")
    with pytest.raises(GrpcCallError, match="over 1000 decompressed") as caught:
        messages_of(deframer, framed_compressed(gzip.compress(bytes(nbytes))))
    assert caught.value.code == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        (b"identity", framed_compressed(b"abc")),
        (b"gzip", framed_compressed(b"abc")),
        (b"gzip", framed_compressed(gzip.compress(b"abc", mtime=0)[:-1])),
        (b"gzip", framed_compressed(gzip.compress(b"abc", mtime=0) + b"x")),
        (b"identity", b"\x02" + framed(b"abc")[1:]),
    ],
)
def test_message_that_cannot_be_decompressed_is_rejected(encoding: bytes, body: bytes) -> None:
    with pytest.raises(GrpcCallError, match="compressed") as caught:
        messages_of(Deframer(BYTES_MAX, encoding), body)
    assert caught.value.grpc_status == "INTERNAL"


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_large_message_counts_by_its_compressed_bytes(encoding: bytes) -> None:
    deframer = Deframer(32 << 20, encoding)
    data = bytes(2 * INLINE_MESSAGE_BYTES_MAX)
    body = zlib.compress(data) if encoding == b"deflate" else gzip.compress(data)[:-4] + b"\xff" * 4
    deframer.feed(framed_compressed(body))
    message = deframer.next_message()
    assert isinstance(message, LargeMessage)
    assert message.nbytes == len(body) < 300


@given(
    st.lists(st.tuples(st.binary(max_size=20), st.integers(1, 50))),
    st.integers(1, 100),
    st.sampled_from((b"gzip", b"deflate")),
    st.booleans(),
)
def test_large_message_is_decompressed_in_bounded_steps(
    runs: list[tuple[bytes, int]], step_bytes: int, encoding: bytes, is_stored: bool
) -> None:
    """Checks steps that end anywhere in the input and in the output."""
    data = b"".join(part * count for part, count in runs)
    compress = gzip.compress if encoding == b"gzip" else zlib.compress
    body = compress(data, 0 if is_stored else 9)
    decompress, sizes = grpc_framing._decompressed, [0]

    def measured(stream: "zlib._Decompress", message: bytes, bytes_max: int) -> bytes:
        chunk = decompress(stream, message, bytes_max)
        sizes.append(max(len(message), len(chunk)))
        return chunk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc_framing, "STEP_BYTES", step_bytes)
        patch.setattr(grpc_framing, "_decompressed", measured)
        assert LargeMessage(body, encoding, len(data), "limit").whole() == data
        assert max(sizes) <= step_bytes
        if data:
            with pytest.raises(GrpcCallError, match="over"):
                LargeMessage(body, encoding, len(data) - 1, "limit").whole()
        for wrong in (body[:-1], body + b"x", body + bytes(2 * step_bytes)):
            with pytest.raises(GrpcCallError, match="another length"):
                LargeMessage(wrong, encoding, len(data), "limit").whole()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1H", 3600),
        (b"2M", 120),
        (b"3S", 3),
        (b"250m", 0.25),
        (b"99999999u", 99.999999),
        (b"5n", 5e-9),
        (b"0n", 0),
        (b"00000001H", 3600),
        (b"99999999H", 99999999 * 3600),
    ],
)
def test_timeout_units_are_parsed(value: bytes, seconds: float) -> None:
    assert parse_timeout(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"m",
        b"5",
        b"5s",
        b"-5m",
        b"1.5S",
        b"123456789n",
        b"1S 1S",
        b"1X",
        b"\xff",
        "٣S".encode(),
    ],
)
def test_invalid_timeout_is_rejected(value: bytes) -> None:
    with pytest.raises(GrpcCallError, match="grpc-timeout is"):
        parse_timeout(value)
