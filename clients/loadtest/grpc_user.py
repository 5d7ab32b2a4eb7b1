"""Load over gRPC: unary calls and streams, with equal numbers of users.

    locust -f clients/loadtest/grpc_user.py --headless -u 16 -r 16 -t 10s --host 127.0.0.1:8001

Name a class to run it alone (UnaryUser, StreamUser). Each user is one connection. A unary user
waits for each response. A stream keeps --stream-depth requests in flight, and the latency of a
request counts from its handover to grpc. A rejected request (RESOURCE_EXHAUSTED) is the failure
"refused" in a separate row. Other failures, such as timeouts, are in the rows of the successful
requests, and their times count there.
"""

from collections import deque
from collections.abc import Callable
from queue import Queue
from time import perf_counter
from typing import Any

import grpc
import grpc.experimental.gevent
from locust import User, events, task
from locust.env import Environment
from locust.exception import CatchResponseError

from embedserve_client import EmbedServeClientError, GrpcEmbedClient
from embedserve_client.core.messages import AnswerReader
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub
from options import LoadTest, prepare
from traffic import Request, kind_of_error, name_of

# grpc's threads must yield to gevent's greenlets before the first channel opens.
grpc.experimental.gevent.init_gevent()

RECEIVE_BYTES_MAX = 2**30
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
    # Without this option all users of the process would share one connection.
    ("grpc.use_local_subchannel_pool", 1),
)


class GrpcUser(User):
    """A user with one gRPC channel, which reports its requests to locust."""

    abstract = True
    test: LoadTest

    def on_start(self) -> None:
        self.random = self.test.random()
        self.answers = AnswerReader()
        self.channel = grpc.insecure_channel(
            target_of(self.environment.host), options=CHANNEL_OPTIONS
        )
        self.stub = EmbeddingServiceStub(self.channel)

    def on_stop(self) -> None:
        self.channel.close()

    def count(self, way: str, request: Request, started: float, read: Callable[[], Any]) -> None:
        """Reports one request to locust; ``read`` returns the response or raises the error."""
        name, length, failure = name_of(way, request.examples), 0, None
        try:
            message = read()
            elapsed_ms = (perf_counter() - started) * 1000
            length = len(message.values)
            failure = self._failure_of(message, request)
        except grpc.RpcError as error:
            elapsed_ms = (perf_counter() - started) * 1000
            failure = kind_of_error(error.code().name, error.details() or "")
        if failure and failure.startswith("refused"):
            name += ", refused"
        self.environment.events.request.fire(
            request_type="gRPC",
            name=name,
            response_time=elapsed_ms,
            response_length=length,
            exception=CatchResponseError(failure) if failure else None,
            context={},
        )

    def _failure_of(self, message: pb.EmbedResponse, request: Request) -> str | None:
        if message.HasField("error"):
            return kind_of_error(message.error.code, message.error.message)
        try:
            self.answers.read(message, request.examples)
        except EmbedServeClientError as error:
            return kind_of_error("INTERNAL", str(error))
        return None


class UnaryUser(GrpcUser):
    """A user that makes Embed calls."""

    @task
    def embed(self) -> None:
        request = self.test.traffic.request(self.random)
        message = request.message()
        timeout_s = self.test.options.timeout_s
        started = perf_counter()
        self.count("unary", request, started, lambda: self.stub.Embed(message, timeout=timeout_s))


class StreamUser(GrpcUser):
    """A user that keeps several requests in flight on an EmbedStream call."""

    def on_start(self) -> None:
        super().on_start()
        self._open()

    def on_stop(self) -> None:
        self.outgoing.put(None)
        self.call.cancel()
        super().on_stop()

    @task
    def embed(self) -> None:
        """Sends requests up to the stream depth, then reads one response."""
        while len(self.under_way) < self.test.options.stream_depth:
            request = self.test.traffic.request(self.random)
            message = request.message()
            self.under_way.append((request, perf_counter()))
            self.outgoing.put(message)
        request, started = self.under_way.popleft()
        self.count("stream", request, started, self._next)
        if self.broken:
            self._reopen()

    def _open(self) -> None:
        self.broken = False
        self.under_way: deque[tuple[Request, float]] = deque()
        self.outgoing: Queue[pb.EmbedRequest | None] = Queue()
        self.call = self.stub.EmbedStream(iter(self.outgoing.get, None))

    def _next(self) -> pb.EmbedResponse:
        """Returns the next response. Marks the stream as broken if it ends without a response, or
        fails."""
        try:
            answer: pb.EmbedResponse = next(self.call)
        except StopIteration:
            self.broken = True
            return pb.EmbedResponse(
                error=pb.Error(code="UNAVAILABLE", message="the server ended the stream")
            )
        except grpc.RpcError:
            self.broken = True
            raise
        return answer

    def _reopen(self) -> None:
        """Reports the requests in flight as lost with the stream, and opens a new stream."""
        self.outgoing.put(None)
        lost = pb.EmbedResponse(error=pb.Error(code="UNAVAILABLE", message="lost with its stream"))
        for request, started in self.under_way:
            self.count("stream", request, started, lambda: lost)
        self._open()


def target_of(host: str | None) -> str:
    """Returns the gRPC target in --host, which the web form may hold as a URL."""
    return (host or "").removeprefix("http://").rstrip("/")


@events.test_start.add_listener
def start(environment: Environment, **_: Any) -> None:
    def list_models() -> Any:
        with GrpcEmbedClient(target_of(environment.host)) as client:
            return client.models()

    test = prepare(environment, list_models)
    if test is not None:
        GrpcUser.test = test
