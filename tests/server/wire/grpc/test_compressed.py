"""Tests of compressed messages: decompression on the event loop is bounded for every client."""

import asyncio
import gzip
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from server.fake_engine import FakeEngine
from server.live import make_pipeline
from server.wire.grpc.grpc_peer import (
    CHECK,
    EMBED,
    STREAM,
    WATCH,
    GrpcPeer,
    data_chunks,
    framed_compressed,
    vector,
)

from embedserve.config import Limits
from embedserve.wire.grpc import grpc_framing
from embedserve.wire.grpc.grpc_framing import (
    DECOMPRESSED_BYTES_PER_WORK,
    INLINE_MESSAGE_BYTES_MAX,
    PLAIN_BYTES_MAX,
    framed,
)
from embedserve.wire.grpc.service import SERVICE_NAME
from embedserve.wire.http2.turns import WORK_PER_TURN
from embedserve_proto import embedding_pb2 as pb

BODY_MAX = 1 << 20
GZIP = [(b"grpc-encoding", b"gzip")]
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
LARGE = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1] + [0] * 300_000).SerializeToString()
SMALL = pb.EmbedRequest(keys=["user"], ids=[2], lengths=[1]).SerializeToString()
PADDED = SMALL + b"\xfa\x3f\xa0\x8d\x06" + bytes(Random(0).choices(range(32), k=100_000))
"""SMALL with an unknown field, which protobuf readers skip. Compressed it has 62 KB."""
ZEROS = bytes(BODY_MAX)
COMPRESSIONS: list[tuple[str, Callable[..., bytes]]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
]


def gzipped(message: bytes) -> bytes:
    return framed_compressed(gzip.compress(message))


@pytest.fixture
def decompressed_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the decompressed bytes by thread."""
    counts: dict[str, int] = {"loop": 0, "codec": 0}
    decompress = grpc_framing._decompressed

    def count(stream: "zlib._Decompress", message: bytes, bytes_max: int) -> bytes:
        whole = decompress(stream, message, bytes_max)
        is_loop = threading.current_thread() is threading.main_thread()
        counts["loop" if is_loop else "codec"] += len(whole)
        return whole

    monkeypatch.setattr(grpc_framing, "_decompressed", count)
    return counts


@pytest.fixture
async def peer(engine: FakeEngine, executor: ThreadPoolExecutor) -> GrpcPeer:
    limits = Limits(body_bytes_max=BODY_MAX)
    return GrpcPeer(make_pipeline(engine, executor=executor, limits=limits))


@pytest.mark.parametrize(
    "path", [CHECK, WATCH, REFLECTION, f"/{SERVICE_NAME}/ListModels", f"/{SERVICE_NAME}/GetModel"]
)
async def test_methods_without_a_lookup_reject_large_messages(
    peer: GrpcPeer, decompressed_bytes: dict[str, int], path: str
) -> None:
    peer.call(1, path, gzipped(ZEROS), more=GZIP)
    peer.call(3, path, framed(bytes(PLAIN_BYTES_MAX + 1))[:5])
    for number, size in ((1, "over 65536 bytes decompressed"), (3, "65537 bytes")):
        assert peer.status(number)[0] == 8
        assert "the limit is 65536 (fixed for methods without a lookup)" in peer.status(number)[1]
        assert size.split()[0] in peer.status(number)[1]
    assert decompressed_bytes == {"loop": PLAIN_BYTES_MAX + 1, "codec": 0}


async def test_bytes_decompressed_per_iteration_are_bounded_for_unary_calls(
    peer: GrpcPeer, decompressed_bytes: dict[str, int]
) -> None:
    body = gzipped(bytes(PLAIN_BYTES_MAX))
    count = 40
    calls = [peer.call_bytes(one, CHECK, body, more=GZIP) for one in range(1, 2 * count, 2)]
    peer.connection.receive(b"".join(calls))
    turns = 1
    while peer.connection.has_more:
        assert decompressed_bytes["loop"] <= turns * (
            WORK_PER_TURN * DECOMPRESSED_BYTES_PER_WORK + PLAIN_BYTES_MAX
        )
        peer.connection.receive(b"")
        turns += 1
    assert decompressed_bytes["loop"] == count * PLAIN_BYTES_MAX
    assert turns >= count * PLAIN_BYTES_MAX // (
        WORK_PER_TURN * DECOMPRESSED_BYTES_PER_WORK + PLAIN_BYTES_MAX
    )


async def test_bytes_decompressed_per_iteration_are_bounded_for_streams(
    peer: GrpcPeer, decompressed_bytes: dict[str, int]
) -> None:
    body = gzipped(bytes(PLAIN_BYTES_MAX)) * 40
    peer.connection.receive(peer.call_bytes(1, STREAM, body, more=GZIP))
    per_turn = WORK_PER_TURN * DECOMPRESSED_BYTES_PER_WORK + PLAIN_BYTES_MAX
    before = 0
    while decompressed_bytes["loop"] < 40 * PLAIN_BYTES_MAX:
        assert before < decompressed_bytes["loop"] <= before + per_turn
        before = decompressed_bytes["loop"]
        await asyncio.sleep(0)
    await peer.wait_for_end(1)
    assert peer.status(1) == (0, "")


@pytest.mark.parametrize(("encoding", "compress"), COMPRESSIONS)
async def test_a_large_message_is_decompressed_in_the_codec_thread(
    peer: GrpcPeer,
    engine: FakeEngine,
    decompressed_bytes: dict[str, int],
    encoding: str,
    compress: Callable[[bytes], bytes],
) -> None:
    more = [(b"grpc-encoding", encoding.encode())]
    peer.call(1, EMBED, framed_compressed(compress(LARGE)), more=more)
    await peer.wait_for_end(1)
    assert decompressed_bytes == {"loop": INLINE_MESSAGE_BYTES_MAX + 1, "codec": len(LARGE)}
    assert peer.status(1)[0] == 8
    assert "examples" in peer.status(1)[1]  # there are too many


async def test_compressed_messages_of_a_stream_keep_their_order(
    peer: GrpcPeer, engine: FakeEngine, decompressed_bytes: dict[str, int]
) -> None:
    first = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1]).SerializeToString()
    peer.call(
        1,
        STREAM,
        *data_chunks(gzipped(first) + gzipped(PADDED) + gzipped(first)),
        more=GZIP,
    )
    await peer.wait_for_end(1)
    assert peer.status(1) == (0, "")
    rows = engine.tables["t_user"]
    assert [vector(one) for one in peer.messages(1)] == [rows[i].tolist() for i in (1, 2, 1)]
    assert decompressed_bytes["codec"] == len(PADDED)


@pytest.mark.parametrize("path", [EMBED, STREAM])
@pytest.mark.parametrize(
    ("body", "code", "error_message"),
    [
        (gzipped(bytes(BODY_MAX + 1)), 8, "over 1048576 decompressed bytes"),
        (framed_compressed(gzip.compress(ZEROS)[:-1]), 13, "another length"),
        (framed_compressed(gzip.compress(ZEROS) + b"x"), 13, "another length"),
        (
            framed_compressed(gzip.compress(ZEROS)[:-4] + b"\0\0\2\0"),
            13,
            "incorrect length check",
        ),
    ],
)
async def test_invalid_large_message_ends_the_call_with_an_error(
    peer: GrpcPeer, path: str, body: bytes, code: int, error_message: str
) -> None:
    peer.call(1, path, body, more=GZIP)
    await peer.wait_for_end(1)
    assert peer.status(1)[0] == code
    assert set(error_message.split()) <= set(peer.status(1)[1].replace(",", "").split())
    assert peer.messages(1) == []


@pytest.mark.parametrize(("encoding", "compress"), COMPRESSIONS)
async def test_queued_messages_count_by_their_compressed_bytes(
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    encoding: str,
    compress: Callable[[bytes], bytes],
) -> None:
    """Sends 8 messages. If each counted as the largest message, a caller's share would hold 4."""
    peer = GrpcPeer(make_pipeline(engine, executor=executor))
    body = data_chunks(framed_compressed(compress(PADDED)))
    more = [(b"grpc-encoding", encoding.encode())]
    numbers = range(1, 17, 2)
    for number in numbers:
        peer.call(number, EMBED, *body, more=more)
    for number in numbers:
        await peer.wait_for_end(number)
        assert peer.status(number) == (0, "")
