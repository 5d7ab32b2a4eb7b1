"""Tests of responses that the fake server never sends: of proxies, broken bodies, failing
connections."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from embedserve_client import (
    DeadlineExceeded,
    EmbedClient,
    EmbedServeClientError,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    ServerError,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)

Handler = Callable[[httpx.Request], httpx.Response]
NESTED = b"[" * 100_000
"""JSON at which Python's parser raises RecursionError."""


def client_of(handler: Handler) -> EmbedClient:
    return EmbedClient("http://test/prefix", transport=httpx.MockTransport(handler))


def error_of(handler: Handler) -> EmbedServeClientError:
    with client_of(handler) as client, pytest.raises(EmbedServeClientError) as caught:
        client.embed({"user": [1]})
    return caught.value


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (301, ServerError),
        (401, Unauthenticated),
        (403, PermissionDenied),
        (404, ServerError),
        (413, TooLarge),
        (429, Overloaded),
        (500, ServerError),
        (502, Unavailable),
        (503, Unavailable),
        (504, DeadlineExceeded),
    ],
)
@pytest.mark.parametrize(
    "body",
    [
        b"<html>sorry</html>",
        b"the limit is 10 requests a second",
        b'{"error": "sorry"}',
        b'{"error": {"code": 503, "message": "sorry"}}',
        b'{"error": {"code": "TooManyRequests", "message": "sorry"}}',
        b'{"error": {"code": [], "message": 3}}',
        b"[]",
        NESTED,
        b"\xff",
    ],
)
def test_proxy_error_is_mapped_by_its_status(
    status: int, kind: type[EmbedServeClientError], body: bytes
) -> None:
    error = error_of(lambda request: httpx.Response(status, content=body))

    assert type(error) is kind
    assert f"status {status}" in str(error)


@pytest.mark.parametrize("charset", ["utf-16", "idna", "hex", "rot13", "no-charset"])
def test_charset_of_a_proxy_error_does_not_matter(charset: str) -> None:
    headers = {"Content-Type": f"text/html; charset={charset}"}
    error = error_of(lambda request: httpx.Response(502, content=b"<p>sorry", headers=headers))

    assert type(error) is Unavailable
    assert str(error) == "status 502: <p>sorry"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "INVALID_ARGUMENT", InvalidRequest),
        (404, "NOT_FOUND", UnknownModel),
        (413, "RESOURCE_EXHAUSTED", TooLarge),
    ],
)
def test_server_error_is_mapped_by_its_code(
    status: int, code: str, kind: type[EmbedServeClientError]
) -> None:
    body = {"error": {"code": code, "message": "why", "field": "ids"}}
    error = error_of(lambda request: httpx.Response(status, json=body))

    assert type(error) is kind
    assert (str(error), error.field) == ("why", "ids")


def test_unknown_path_is_no_unknown_model() -> None:
    body = {"error": {"code": "NOT_FOUND", "message": "POST /x/models/m/embed: Not Found"}}
    error = error_of(lambda request: httpx.Response(404, json=body))

    assert type(error) is ServerError
    assert str(error) == "POST /x/models/m/embed: Not Found: is the path of base_url right?"


def test_missing_list_of_models_may_be_on_the_management_port() -> None:
    body = {"error": {"code": "NOT_FOUND", "message": "GET /models: Not Found"}}
    error = error_of(lambda request: httpx.Response(404, json=body))

    assert type(error) is ServerError
    assert str(error).endswith("right? A management port, if there is one, has the models")


@pytest.mark.parametrize(
    ("header", "retry_after_s"), [("3", 3.0), ("Fri, 31 Dec 1999 23:59:59 GMT", None), ("-1", None)]
)
def test_retry_after_is_read_in_seconds(header: str, retry_after_s: float | None) -> None:
    error = error_of(lambda request: httpx.Response(429, headers={"Retry-After": header}))

    assert error.retry_after_s == retry_after_s


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (httpx.ConnectTimeout("slow"), DeadlineExceeded),
        (httpx.ReadTimeout(""), DeadlineExceeded),
        (httpx.PoolTimeout("full"), DeadlineExceeded),
        (httpx.ConnectError("refused"), Unavailable),
        (httpx.RemoteProtocolError("gone"), Unavailable),
        (httpx.DecodingError("not gzip"), ServerError),
    ],
)
def test_httpx_exceptions_become_client_errors(
    raised: httpx.HTTPError, kind: type[EmbedServeClientError]
) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise raised

    error = error_of(handler)

    assert type(error) is kind
    assert error.__cause__ is raised
    assert (str(raised) or type(raised).__name__) in str(error)


def test_malformed_response_body_raises_server_error() -> None:
    assert type(error_of(lambda request: httpx.Response(200, content=b"hello"))) is ServerError
    assert type(error_of(lambda request: httpx.Response(200))) is ServerError


@pytest.mark.parametrize("body", [b"no json", b'{"models": 3}', b"[]", NESTED, b"\xff\xfe"])
def test_malformed_model_list_raises_server_error(body: bytes) -> None:
    with (
        client_of(lambda request: httpx.Response(200, content=body)) as client,
        pytest.raises(ServerError, match="no ListModelsResponse"),
    ):
        client.models()


def test_paths_keep_the_prefix_and_quote_the_model_name() -> None:
    requested_paths: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        requested_paths.append(request.url.raw_path)
        return httpx.Response(200, json={"model": "a?b c"})

    with client_of(handler) as client:
        assert client.model("a?b c").model == "a?b c"

    assert requested_paths == [b"/prefix/models/a%3Fb%20c"]


@pytest.mark.parametrize("name", ["", ".", "..", "../health", "shop/plan"])
def test_name_that_would_make_another_path_is_no_model(name: str) -> None:
    plan = {"model": "shop", "version": 7}
    with (
        client_of(lambda request: httpx.Response(200, json=plan)) as client,
        pytest.raises(UnknownModel, match="which no model is called"),
    ):
        client.model(name)
