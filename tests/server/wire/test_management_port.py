"""Tests of the management port: it alone serves management, and needs tokens unless on loopback."""

import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from server.channels import OWN_CONNECTION
from server.fake_engine import FakeEngine
from server.live import Live, make_pipeline, serving
from server.waiting import WAIT_S_MAX

from embedserve.access.authenticator import Authenticator
from embedserve.access.grants import hash_of
from embedserve.config import ServeSettings
from embedserve.config_checks import check_settings
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

BODY = b'{"features": {"user": [[1]]}}'
MANAGEMENT = ["/metrics", "/slow", "/info", "/docs", "/openapi.json", "/models", "/models/shop"]
MANAGEMENT += ["/models/shop/plan", "/console/labels/shop"]
PAGE = ["/console", "/console/console.js"]
MANAGEMENT += ["/v2", "/v2/models/shop", "/v2/models/shop/ready", "/v2/models/stats"]
HEALTH = ["/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"]


@pytest.fixture
def authenticator(tmp_path: Path) -> Authenticator:
    path = tmp_path / "tokens"
    line = {"name": "boss", "sha256": hash_of(b"es_boss"), "roles": ["admin"]}
    path.write_text(json.dumps(line))
    return Authenticator(str(path))


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])
async def live(
    request: pytest.FixtureRequest,
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    authenticator: Authenticator,
) -> AsyncIterator[Live]:
    pipeline = make_pipeline(engine, executor=executor, authenticator=authenticator)
    async with serving(pipeline, management_host=request.param) as live:
        yield live


async def statuses(live: Live, port: int, paths: list[str], token: str = "") -> set[int]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=WAIT_S_MAX, verify=False
    ) as http:
        return {(await http.get(path)).status_code for path in paths}


async def list_models(target: str, token: str = "") -> str:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with grpc.aio.insecure_channel(target, options=OWN_CONNECTION) as channel:
        stub = EmbeddingServiceStub(channel)
        try:
            await stub.ListModels(pb.ListModelsRequest(), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
    return "OK"


async def test_management_port_serves_management_routes_only_to_authorized_callers(
    live: Live, request: pytest.FixtureRequest
) -> None:
    is_loopback = "127.0.0.1" in request.node.name
    for token in ("", "es_boss"):
        assert await statuses(live, live.http_port, HEALTH, token) == {200}
        assert await statuses(live, live.http_port, MANAGEMENT + PAGE, token) == {404}
        assert await list_models(live.grpc_target, token) == "UNIMPLEMENTED"
    port, target = live.management_port, f"127.0.0.1:{live.management_port}"
    assert await statuses(live, port, HEALTH + PAGE) == {200}
    assert await statuses(live, port, MANAGEMENT) == ({200} if is_loopback else {401})
    assert await statuses(live, port, MANAGEMENT, "es_boss") == {200}
    assert await list_models(target) == ("OK" if is_loopback else "UNAUTHENTICATED")
    assert await list_models(target, "es_boss") == "OK"


async def test_lookups_on_the_management_port_need_a_token(live: Live) -> None:
    for port in (live.http_port, live.management_port):
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S_MAX, verify=False) as http:
            assert (await http.post("/embed", content=BODY)).status_code == 401


def test_reachable_management_host_requires_tokens() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_settings(ServeSettings(store="", management_port=0, management_host=host))
    for host in ("0.0.0.0", "10.0.0.1", "::", "example.org"):
        with pytest.raises(ValueError, match=r"management_host is .*: give tokens"):
            check_settings(ServeSettings(store="", management_port=0, management_host=host))
        settings = ServeSettings("", management_port=0, management_host=host, tokens="file")
        check_settings(settings)
