"""Tests of Python's h2 over a plain socket: frames of a gRPC call and of a REST request."""

import json
import socket
from collections.abc import Iterator

import pytest
from grpc_messages import unframed
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
from interop.lookups import INVALID, INVALID_FIELD, SERVICE, lookup
from interop.tools import ANSWER_S_MAX

from embedserve_proto import embedding_pb2 as pb

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

    def wait_for(self, kind: type[Event], stream: int | None = None) -> Event:
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
        headers = [(":method", "POST"), (":scheme", "http"), (":authority", self.authority)]
        self.h2.send_headers(stream, [*headers, (":path", path), *fields])
        return stream

    def post(self, path: str, body: bytes, *fields: tuple[str, str]) -> int:
        stream = self.open(path, *fields)
        self.h2.send_data(stream, body, end_stream=True)
        return stream

    def grpc(self, method: str, body: bytes) -> int:
        fields = (("te", "trailers"), ("content-type", "application/grpc"))
        return self.post(f"/{SERVICE}/{method}", body, *fields)

    def response(self, stream: int) -> tuple[Fields, bytes, Fields]:
        """Returns (headers, body, trailers) once the stream has ended."""
        self.wait_for(StreamEnded, stream)
        headers: Fields = {}
        trailers: Fields = {}
        body = b""
        for event in self.events:
            if getattr(event, "stream_id", None) != stream:
                continue
            if isinstance(event, ResponseReceived):
                headers = _fields(event)
            elif isinstance(event, TrailersReceived):
                trailers = _fields(event)
            elif isinstance(event, DataReceived):
                body += event.data
        return headers, body, trailers

    def close(self) -> None:
        self._socket.close()


def _fields(event: ResponseReceived | TrailersReceived) -> Fields:
    return {name.decode(): value.decode() for name, value in event.headers}


@pytest.fixture
def client(each_port: str) -> Iterator[Client]:
    client = Client(each_port)
    yield client
    client.close()


def test_server_announces_its_settings(client: Client) -> None:
    client.wait_for(RemoteSettingsChanged)
    settings = client.h2.remote_settings
    assert settings.max_concurrent_streams == 128
    assert settings[SettingCodes.MAX_HEADER_LIST_SIZE] == 16_384


def test_ping_is_answered_with_its_payload(client: Client) -> None:
    client.h2.ping(b"embedsrv")
    ack = client.wait_for(PingAckReceived)
    assert isinstance(ack, PingAckReceived)
    assert ack.ping_data == b"embedsrv"


def test_grpc_error_is_a_trailers_only_response(client: Client) -> None:
    headers, body, trailers = client.response(client.grpc("Embed", INVALID.framed))
    assert (headers[":status"], headers["content-type"]) == ("200", "application/grpc")
    assert (headers["grpc-status"], headers["embedserve-field"]) == ("3", INVALID_FIELD)
    assert "features.user%" not in headers["grpc-message"]
    assert (body, trailers) == (b"", {})


def test_concurrent_grpc_and_rest_streams_are_answered(client: Client) -> None:
    client.wait_for(RemoteSettingsChanged)
    requested = lookup(2)
    json_type = ("content-type", "application/json")
    grpc_streams = [client.grpc("Embed", requested.framed) for _ in range(60)]
    rest_streams = [client.post("/embed", requested.json_body, json_type) for _ in range(60)]
    for stream in rest_streams:
        headers, body, trailers = client.response(stream)
        assert (headers[":status"], headers["content-type"]) == ("200", "application/json")
        assert (json.loads(body), trailers) == (requested.json_response, {})
        assert headers["content-length"] == str(len(body))
    for stream in grpc_streams:
        _, body, trailers = client.response(stream)
        assert pb.EmbedResponse.FromString(*unframed(body)) == requested.response
        assert trailers["grpc-status"] == "0"
    assert not any(isinstance(event, ConnectionTerminated) for event in client.events)


def test_headers_in_continuation_frames_are_accepted(client: Client) -> None:
    client.wait_for(RemoteSettingsChanged)
    requested = lookup(5)
    client.h2.max_outbound_frame_size = 50
    stream = client.open("/embed", *((f"x-{number}", "v" * number) for number in range(80)))
    client.h2.max_outbound_frame_size = 16_384
    client.h2.send_data(stream, requested.json_body, end_stream=True)
    headers, body, _ = client.response(stream)
    assert (headers[":status"], json.loads(body)) == ("200", requested.json_response)


def test_grpc_stream_answers_each_message_before_the_stream_ends(client: Client) -> None:
    """Checks that EmbedStream responds to each message once it is complete, however it is split."""
    first, second = lookup(3), lookup(4)
    fields = (("te", "trailers"), ("content-type", "application/grpc+proto"))
    stream = client.open(f"/{SERVICE}/EmbedStream", *fields)
    for byte in first.framed:
        client.h2.send_data(stream, bytes([byte]))
    response = b""
    while len(response) < 5 + first.response.ByteSize():
        event = client.wait_for(DataReceived, stream)
        assert isinstance(event, DataReceived)
        client.events.remove(event)
        response += event.data
    client.h2.send_data(stream, second.framed, end_stream=True)
    _, rest, trailers = client.response(stream)
    messages = [pb.EmbedResponse.FromString(one) for one in unframed(response + rest)]
    assert messages == [first.response, second.response]
    assert trailers["grpc-status"] == "0"
