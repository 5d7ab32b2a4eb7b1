"""A gRPC client of a connection without sockets, and the requests that its tests send."""

from __future__ import annotations

from urllib.parse import unquote

import numpy as np
from hyperframe.frame import Frame, HeadersFrame
from server.pipelines import outcomes_of
from server.waiting import until
from server.wire.http2.peer import Peer, body_of, data, of

from embedserve.api.management import management_app
from embedserve.pipeline import RequestPipeline
from embedserve.wire.grpc.service import SERVICE_NAME, GrpcService
from embedserve.wire.http_stream import Headers
from embedserve.wire.route_table import RouteTable
from embedserve_proto import embedding_pb2 as pb

EMBED = f"/{SERVICE_NAME}/Embed"
STREAM = f"/{SERVICE_NAME}/EmbedStream"
MESSAGE = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1]).SerializeToString()
BODY_MAX = 300_000


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

    def call(self, stream_id: int, path: str, *chunks: bytes, more: Headers | None = None) -> None:
        """Sends a request whose body comes in ``chunks``."""
        frames = [data(stream_id, chunk) for chunk in chunks]
        if frames:
            frames[-1].flags.add("END_STREAM")
        self.send(
            self.headers(stream_id, request_headers(path, *(more or [])), is_end=not chunks),
            *frames,
        )

    def status(self, stream_id: int) -> tuple[int, str]:
        """Returns the (code, message) that a call ended with."""
        end = self.trailers[stream_id]
        return int(end[b"grpc-status"]), unquote(end.get(b"grpc-message", b"").decode())

    def messages(self, stream_id: int) -> list[bytes]:
        """Returns the response messages of the call so far."""
        body, found = body_of(self.seen, stream_id), []
        while body:
            size = int.from_bytes(body[1:5], "big")
            assert (body[0], len(body) >= 5 + size) == (0, True)
            found.append(body[5 : 5 + size])
            body = body[5 + size :]
        return found

    async def wait_for_end(self, stream_id: int) -> None:
        def has_ended() -> bool:
            self.take()
            return stream_id in self.trailers

        await until(has_ended)


def outcomes(peer: GrpcPeer) -> dict[str, int]:
    return dict(outcomes_of(peer.pipeline.metrics.protocols["grpc"]))


def vector(message: bytes) -> list[float]:
    response = pb.EmbedResponse.FromString(message)
    values: list[float] = np.frombuffer(response.values, "<f4")[:4].tolist()
    return values


CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
