"""Tests of Python's h2 over a plain socket: frames of a gRPC call and of a REST request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    TrailersReceived,
)
from h2.settings import SettingCodes
from interop.lookups import SERVICE, WRONG, WRONG_FIELD, lookup, unframed

from embedserve_proto import embedding_pb2 as pb

ANSWER_S_MAX = 60
Fields = dict[str, str]


class Client:
    """A connection that keeps every event it received."""

    def __init__(self, target: str) -> None:
        self.authority = target
        host, port = target.split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=ANSWER_S_MAX)
        self.h2 = H2Connection()
        self.h2.initiate_connection()
        self.events: list[Event] = []

    def flush(self) -> None:
        self._socket.sendall(self.h2.data_to_send())

    def until(self, kind: type[Event], stream: int | None = None) -> Event:
        """Waits for the first event of that kind, of ``stream`` if it is given."""
        self.flush()
        while True:
            for event in self.events:
                if isinstance(event, kind) and stream in (None, getattr(event, "stream_id", None)):
                    return event
            data = self._socket.recv(65_536)
            assert data, "the server closed the connection"
            for event in self.h2.receive_data(data):
                if isinstance(event, DataReceived):
                    size = event.flow_controlled_length
                    self.h2.acknowledge_received_data(size, event.stream_id)
                self.events.append(event)
            self.flush()

    def open(self, path: str, *fields: tuple[str, str]) -> int:
        """Opens a stream, and sends its headers without a body."""
        stream: int = self.h2.get_next_available_stream_id()
        head = [(":method", "POST"), (":scheme", "http"), (":authority", self.authority)]
        self.h2.send_headers(stream, [*head, (":path", path), *fields])
        return stream

    def post(self, path: str, body: bytes, *fields: tuple[str, str]) -> int:
        stream = self.open(path, *fields)
        self.h2.send_data(stream, body, end_stream=True)
        return stream

    def grpc(self, method: str, body: bytes) -> int:
        fields = (("te", "trailers"), ("content-type", "application/grpc"))
        return self.post(f"/{SERVICE}/{method}", body, *fields)

    def answer(self, stream: int) -> tuple[Fields, bytes, Fields]:
        """Returns (headers, body, trailers) once the stream has ended."""
        self.until(StreamEnded, stream)
        head: Fields = {}
        trailers: Fields = {}
        body = b""
        for event in self.events:
            if getattr(event, "stream_id", None) != stream:
                continue
            if isinstance(event, ResponseReceived):
                head = _fields(event)
            elif isinstance(event, TrailersReceived):
                trailers = _fields(event)
            elif isinstance(event, DataReceived):
                body += event.data
        return head, body, trailers

    def close(self) -> None:
        self._socket.close()


def _fields(event: ResponseReceived | TrailersReceived) -> Fields:
    return {name.decode(): value.decode() for name, value in event.headers}


@pytest.fixture
def client(each_port: str) -> Iterator[Client]:
    client = Client(each_port)
    yield client
    client.close()


def test_the_server_says_its_settings(client: Client) -> None:
    client.until(RemoteSettingsChanged)
    settings = client.h2.remote_settings
    assert settings.max_concurrent_streams == 128
    assert settings[SettingCodes.MAX_HEADER_LIST_SIZE] == 16_384


def test_a_ping_is_answered_with_its_bytes(client: Client) -> None:
    client.h2.ping(b"embedsrv")
    ack = client.until(PingAckReceived)
    assert isinstance(ack, PingAckReceived)
    assert ack.ping_data == b"embedsrv"


def test_a_grpc_error_is_trailers_only(client: Client) -> None:
    head, body, trailers = client.answer(client.grpc("Embed", WRONG.framed))
    assert (head[":status"], head["content-type"]) == ("200", "application/grpc")
    assert (head["grpc-status"], head["embedserve-field"]) == ("3", WRONG_FIELD)
    assert "features.user%" not in head["grpc-message"]
    assert (body, trailers) == (b"", {})


def test_streams_of_both_protocols_beside_each_other(client: Client) -> None:
    client.until(RemoteSettingsChanged)
    asked = lookup(2)
    json_type = ("content-type", "application/json")
    grpc_streams = [client.grpc("Embed", asked.framed) for _ in range(60)]
    rest_streams = [client.post("/embed", asked.json_body, json_type) for _ in range(60)]
    for stream in rest_streams:
        head, body, trailers = client.answer(stream)
        assert (head[":status"], head["content-type"]) == ("200", "application/json")
        assert (json.loads(body), trailers) == (asked.json_answer, {})
        assert head["content-length"] == str(len(body))
    for stream in grpc_streams:
        _, body, trailers = client.answer(stream)
        assert pb.EmbedResponse.FromString(*unframed(body)) == asked.answer
        assert trailers["grpc-status"] == "0"
    assert not any(isinstance(event, ConnectionTerminated) for event in client.events)


def test_headers_in_continuation_frames(client: Client) -> None:
    client.until(RemoteSettingsChanged)
    asked = lookup(5)
    client.h2.max_outbound_frame_size = 50
    stream = client.open("/embed", *((f"x-{number}", "v" * number) for number in range(80)))
    client.h2.max_outbound_frame_size = 16_384
    client.h2.send_data(stream, asked.json_body, end_stream=True)
    head, body, _ = client.answer(stream)
    assert (head[":status"], json.loads(body)) == ("200", asked.json_answer)


def test_a_stream_answers_before_its_end(client: Client) -> None:
    """Checks that EmbedStream responds to each message once it is complete, however it is split."""
    first, second = lookup(3), lookup(4)
    fields = (("te", "trailers"), ("content-type", "application/grpc+proto"))
    stream = client.open(f"/{SERVICE}/EmbedStream", *fields)
    for byte in first.framed:
        client.h2.send_data(stream, bytes([byte]))
    answer = b""
    while len(answer) < 5 + first.answer.ByteSize():
        event = client.until(DataReceived, stream)
        assert isinstance(event, DataReceived)
        client.events.remove(event)
        answer += event.data
    client.h2.send_data(stream, second.framed, end_stream=True)
    _, rest, trailers = client.answer(stream)
    messages = [pb.EmbedResponse.FromString(one) for one in unframed(answer + rest)]
    assert messages == [first.answer, second.answer]
    assert trailers["grpc-status"] == "0"
