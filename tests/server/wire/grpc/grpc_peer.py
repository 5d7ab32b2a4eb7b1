"""A gRPC client of a connection without sockets, and the requests that its tests send."""

from urllib.parse import unquote

import numpy as np
from grpc_messages import unframed
from hyperframe.frame import Frame, HeadersFrame
from server.pipelines import outcomes_of
from server.waiting import until
from server.wire.http2.peer import Peer, body_of, data, of

from embedserve.api.management import management_app
from embedserve.pipeline import RequestPipeline
from embedserve.wire.grpc.grpc_framing import GrpcHeaders
from embedserve.wire.grpc.service import SERVICE_NAME, GrpcService
from embedserve.wire.http2.frames import FRAME_BYTES_MAX
from embedserve.wire.http_stream import Headers
from embedserve.wire.route_table import RouteTable
from embedserve_proto import embedding_pb2 as pb

EMBED = f"/{SERVICE_NAME}/Embed"
STREAM = f"/{SERVICE_NAME}/EmbedStream"
MESSAGE = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1]).SerializeToString()
BODY_MAX = 300_000
NO_HEADERS = GrpcHeaders(b"identity", None, {})


def request_headers(
    path: str, *more: tuple[bytes, bytes], content_type: bytes = b"application/grpc"
) -> Headers:
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"h"),
        (b"content-type", content_type),
        (b"te", b"trailers"),
        *more,
    ]


class GrpcPeer(Peer):
    """A client of a connection over a pipeline, and the trailers of its calls."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        routes = RouteTable(pipeline, management_app(pipeline), GrpcService(pipeline))
        super().__init__(routes.resolve_http2)
        self.pipeline = pipeline
        self.trailers: dict[int, dict[bytes, bytes]] = {}

    def take(self) -> list[Frame]:
        frames = super().take()
        for frame in of(frames, HeadersFrame):
            headers = dict(self.response_headers(frame))
            if "END_STREAM" in frame.flags:
                self.trailers[frame.stream_id] = headers
        return frames

    def call_bytes(
        self,
        stream_id: int,
        path: str,
        *chunks: bytes,
        more: Headers | None = None,
        is_end: bool = True,
    ) -> bytes:
        """Returns the frames of a request whose body comes in ``chunks``."""
        headers = request_headers(path, *(more or []))
        frames: list[Frame] = [self.headers(stream_id, headers, is_end=False)]
        frames += [data(stream_id, chunk) for chunk in chunks]
        if is_end:
            frames[-1].flags.add("END_STREAM")
        return b"".join(frame.serialize() for frame in frames)

    def call(
        self,
        stream_id: int,
        path: str,
        *chunks: bytes,
        more: Headers | None = None,
        is_end: bool = True,
    ) -> list[Frame]:
        """Sends such a request; returns the frames that the connection sends."""
        return self.send(self.call_bytes(stream_id, path, *chunks, more=more, is_end=is_end))

    def status(self, stream_id: int) -> tuple[int, str]:
        """Returns the (code, message) that a call ended with."""
        end = self.trailers[stream_id]
        return int(end[b"grpc-status"]), unquote(end.get(b"grpc-message", b"").decode())

    def messages(self, stream_id: int) -> list[bytes]:
        """Returns the response messages of the call so far."""
        return unframed(body_of(self.seen, stream_id))

    async def wait_for_end(self, stream_id: int) -> None:
        def has_ended() -> bool:
            self.take()
            return stream_id in self.trailers

        await until(has_ended)


def framed_compressed(packed: bytes) -> bytes:
    """Returns the message that ``packed`` is compressed to, with its prefix."""
    return b"\1" + len(packed).to_bytes(4, "big") + packed


def data_chunks(body: bytes) -> list[bytes]:
    """Splits ``body`` into as few frames as possible."""
    return [body[i : i + FRAME_BYTES_MAX] for i in range(0, len(body), FRAME_BYTES_MAX)]


def outcomes(peer: GrpcPeer) -> dict[str, int]:
    return dict(outcomes_of(peer.pipeline.metrics.protocols["grpc"]))


def vector(message: bytes) -> list[float]:
    response = pb.EmbedResponse.FromString(message)
    values: list[float] = np.frombuffer(response.values, "<f4")[:4].tolist()
    return values


CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
