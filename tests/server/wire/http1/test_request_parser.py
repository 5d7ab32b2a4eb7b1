"""Tests of the request parser: headers, body and end of requests, and bounded trailers."""

import pytest
from server.raw_http import OurServer, get, read_response
from server.waiting import until

from embedserve.wire.http1.request_parser import HEAD_BYTES_MAX, RequestParser
from embedserve.wire.http_stream import HttpRequest
from embedserve.wire.rest.headers import HeadersTooLargeError

CHUNKED = b"POST /embed HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


class RecordingReceiver:
    """Records what a parser passes on."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.body = b""
        self.ends = 0

    def begin_request(self, request: HttpRequest, *, is_1_0: bool, is_last: bool) -> None:
        self.requests.append(request)

    def receive_body(self, data: bytes) -> None:
        self.body += data

    def end_request(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_trailers_are_not_added_to_the_headers(step: int) -> None:
    received = RecordingReceiver()
    parser = RequestParser(received, b"http")
    data = CHUNKED + b"Host: other\r\nAuthorization: Bearer x\r\n\r\n" + get("/")
    for start in range(0, len(data), step):
        parser.feed(data[start : start + step])
    first, second = received.requests
    assert [name for name, _ in first.headers] == [b"host", b"transfer-encoding"]
    assert (second.target, second.headers) == (b"/", [(b"host", b"test")])
    assert (received.body, received.ends) == (b"{}", 2)
    assert parser.held_bytes == 0


@pytest.mark.parametrize("trailer", [b"x: y\r\n", b"a", b"x:" + b" " * 100])
def test_endless_trailers_raise_headers_too_large(trailer: bytes) -> None:
    parser = RequestParser(RecordingReceiver(), b"http")
    parser.feed(CHUNKED)
    chunk = trailer * (4096 // len(trailer))
    for _ in range(HEAD_BYTES_MAX // 4096):
        parser.feed(chunk)
    with pytest.raises(HeadersTooLargeError, match=f"the limit is {HEAD_BYTES_MAX}"):
        parser.feed(chunk)


def test_one_byte_body_chunks_do_not_count_as_trailers() -> None:
    received = RecordingReceiver()
    parser = RequestParser(received, b"http")
    parser.feed(CHUNKED.partition(b"2\r\n")[0])
    for _ in range(HEAD_BYTES_MAX):
        for byte in (b"1", b"\r", b"\n", b"x", b"\r", b"\n"):
            parser.feed(byte)
    parser.feed(b"0\r\n\r\n")
    assert (len(received.body), received.ends) == (HEAD_BYTES_MAX, 1)


def test_body_of_known_length_does_not_count_as_trailers() -> None:
    received = RecordingReceiver()
    parser = RequestParser(received, b"http")
    nbytes = 2 * HEAD_BYTES_MAX
    parser.feed(b"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % nbytes)
    for _ in range(nbytes // 4096):
        parser.feed(b"x" * 4096)
    assert (len(received.body), received.ends) == (nbytes, 1)


async def test_request_with_endless_trailers_is_rejected_with_431(server: OurServer) -> None:
    reader, _ = await server.open(CHUNKED + b"x: y\r\n" * 10_000)
    status, headers, _ = await read_response(reader)
    assert (status, headers[b"connection"]) == (431, b"close")
    assert await reader.read() == b""
    await until(lambda: not server.http1())
