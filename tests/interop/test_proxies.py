"""Tests of servers behind nginx, HAProxy and Envoy: unary calls, streams and REST are unchanged."""

import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import httpx
import pytest
from interop.drivers import Call, go_driver
from interop.lookups import INVALID, INVALID_FIELD, large_request, large_response, lookup, lookups
from interop.proxies import PROXIES, Proxy, ports_of
from interop.tools import ANSWER_S_MAX, ANY_SIZE, run_tool
from protocols.logs import fields_of
from running_servers import Running
from server.channels import OWN_CONNECTION
from server.fake_deltas import at_seq
from server.fake_engine import FakeEngine
from server.fake_models import model_info
from server.live import live_server

from embedserve.access.client_address import ClientAddresses
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

EMBED = "/embedserve.v1.EmbeddingService/Embed"
PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture(scope="module", params=list(PROXIES))
def proxy(
    server: Running, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp(request.param)
    with PROXIES[request.param](folder, ports_of(server.http, server.grpc)) as proxy:
        yield proxy


@pytest.fixture
def stub(proxy: Proxy) -> Iterator[EmbeddingServiceStub]:
    with grpc.insecure_channel(proxy.grpc, options=(*OWN_CONNECTION, *ANY_SIZE)) as channel:
        yield EmbeddingServiceStub(channel)


def test_sequential_and_concurrent_unary_calls_are_answered(stub: EmbeddingServiceStub) -> None:
    requested = lookups(100)
    for one in requested[:30]:
        assert stub.Embed(one.request, timeout=ANSWER_S_MAX) == one.response
    calls = [stub.Embed.future(one.request, timeout=ANSWER_S_MAX) for one in requested]
    assert [call.result() for call in calls] == [one.response for one in requested]


def test_large_messages_are_answered(stub: EmbeddingServiceStub) -> None:
    for one in (large_response(), large_request()):
        assert stub.Embed(one.request, timeout=ANSWER_S_MAX) == one.response


def test_stream_is_answered_in_order(stub: EmbeddingServiceStub) -> None:
    requested = [*lookups(100), large_response(), lookup(100)]
    stream = stub.EmbedStream((one.request for one in requested), timeout=ANSWER_S_MAX)
    assert list(stream) == [one.response for one in requested]
    assert stream.code() is grpc.StatusCode.OK


def test_grpc_error_keeps_its_status_and_field(stub: EmbeddingServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Embed(INVALID.request, timeout=ANSWER_S_MAX)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["embedserve-field"] == INVALID_FIELD


def test_grpc_go_calls_through_the_proxy_are_answered(proxy: Proxy) -> None:
    requested = lookups(100)
    calls = [Call("EmbedStream", requested[:50], in_turns=True)]
    calls += [Call("Embed", [one]) for one in requested]
    stream, *unary = go_driver()(proxy.grpc, *calls, gzip=True)
    assert stream.responses == [one.response for one in requested[:50]]
    assert [one.responses for one in unary] == [[one.response] for one in requested]


def test_rest_requests_and_errors_pass_through_the_proxy(proxy: Proxy) -> None:
    with httpx.Client(base_url=proxy.http, timeout=ANSWER_S_MAX) as client:
        for one in (*lookups(30), large_response(), large_request()):
            response = client.post("/embed", content=one.body, headers=PROTOBUF)
            assert response.status_code == 200
            assert pb.EmbedResponse.FromString(response.content) == one.response
        response = client.post("/embed", content=lookup(1).json_body)
        assert response.json() == lookup(1).json_response
        response = client.post("/embed", content=INVALID.json_body)
        assert (response.status_code, response.json()["error"]["field"]) == (400, INVALID_FIELD)
        assert client.get("/models").json()["models"][0]["model"] == "shop"
        assert client.get("/nothing").status_code == 404


def test_h2load_through_the_proxy_loses_no_requests(
    proxy: Proxy, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Uses HTTP/2 for HAProxy's REST port, HTTP/1.1 for nginx's."""
    requested, body = lookup(2), tmp_path_factory.mktemp("h2load") / "body"
    body.write_bytes(requested.body)
    version = ("--h1",) if proxy.name == "nginx" else ()
    load = (*version, "-n", 2000, "-c", 4, "-m", 50, "-d", body)
    output = run_tool(
        "h2load", *load, "-H", "content-type: application/x-protobuf", proxy.http + "/embed"
    )
    assert b"2000 succeeded, 0 failed, 0 errored, 0 timeout" in output
    assert b"status codes: 2000 2xx," in output


@pytest.mark.parametrize("name", PROXIES)
async def test_log_has_the_client_address_despite_forged_headers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = "127.0.0.2"  # the proxy has 127.0.0.1
    forged = {"forwarded": "for=198.51.100.9", "x-forwarded-for": "198.51.100.9"}
    framed = {"content-type": "application/grpc", "te": "trailers"}
    async with live_server(FakeEngine()) as live:
        live.pipeline.addresses = ClientAddresses(["127.0.0.1"])
        ports = ports_of(f":{live.http_port}", live.grpc_target)
        with PROXIES[name](tmp_path, ports) as proxy:
            for http2, url, body, headers in (
                (False, f"{proxy.http}/embed", b"{}", {}),
                (True, f"http://{proxy.grpc}{EMBED}", bytes(5), framed),
            ):
                transport = httpx.AsyncHTTPTransport(
                    http1=not http2, http2=http2, local_address=client
                )
                async with httpx.AsyncClient(
                    transport=transport, timeout=ANSWER_S_MAX
                ) as http_client:
                    await http_client.post(url, content=body, headers={**headers, **forged})
    logged = [fields["address"] for fields in fields_of(caplog, "rejected with INVALID_ARGUMENT")]
    assert logged == [client] * 2


@pytest.mark.parametrize("name", PROXIES)
async def test_503_for_a_future_min_seq_does_not_affect_other_lookups(
    name: str, tmp_path: Path
) -> None:
    """Checks a min_seq ahead of the rows: each server's 503 does not make it unhealthy."""
    async with AsyncExitStack() as open_:
        engines = [FakeEngine(at_seq(model_info(), 3)) for _ in range(2)]
        servers = [await open_.enter_async_context(live_server(one)) for one in engines]
        to = [ports_of(f":{one.http_port}", one.grpc_target) for one in servers]
        proxy = open_.enter_context(PROXIES[name](tmp_path, *to))
        client = await open_.enter_async_context(
            httpx.AsyncClient(base_url=proxy.http, timeout=ANSWER_S_MAX)
        )
        available = {"features": {"user": [[1]]}}
        codes = [
            (await client.post("/embed", json=body)).status_code
            for body in (available, {**available, "min_seq": 9}) * 10
        ]
    assert codes == [200, 503] * 10
