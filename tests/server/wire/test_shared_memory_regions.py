"""Tests of the registration of shared-memory regions, and of their owners."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from server.fake_engine import FakeEngine
from server.live import Live, make_pipeline, serving
from server.openapi import validate
from server.waiting import until
from server.wire.inference_requests import RejectedRequestError, as_json, as_raw, stub
from server.wire.shared_memory_requests import (
    IDS_OFFSET,
    INPUTS,
    INS,
    REST,
    USER,
    VECTORS_OFFSET,
    Memory,
    in_regions,
    live,
    memory,
    register,
)

from embedserve.access.authenticator import Authenticator
from embedserve.access.grants import hash_of
from embedserve.config import Limits
from embedserve.shared_memory.region_registry import EVERYBODY, RegionRegistry
from embedserve_proto import open_inference_pb2 as pb

__all__ = ["live", "memory"]


async def test_region_status_is_equal_over_rest_and_grpc(live: Live, memory: Memory) -> None:
    get, calls = live.http.get, stub(live)
    extensions = (await get("/v2")).json()["extensions"]
    assert "system_shared_memory" in extensions
    server = await calls.ServerMetadata(pb.ServerMetadataRequest())
    assert list(server.extensions) == extensions
    assert (await get(f"{REST}/status")).json() == []
    await register(live, memory)
    ids = {"name": "ids", "key": "/ids", "offset": IDS_OFFSET, "byte_size": 0}
    ids["byte_size"] = memory.ids.stat().st_size - IDS_OFFSET
    assert (await get(f"{REST}/region/ids/status")).json() == [ids]
    assert [one["name"] for one in (await get(f"{REST}/status")).json()] == ["ids", "vectors"]
    status = await calls.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name="ids"))
    (one,) = status.regions.values()
    region = {"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.byte_size}
    assert (list(status.regions), region) == (["ids"], ids)
    unregister_request = pb.SystemSharedMemoryUnregisterRequest(name="ids")
    await calls.SystemSharedMemoryUnregister(unregister_request)
    await calls.SystemSharedMemoryRegister(
        pb.SystemSharedMemoryRegisterRequest(name="more", key="ids", byte_size=8)
    )
    status = await calls.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
    assert set(status.regions) == {"more", "vectors"}
    assert (await live.http.post(f"{REST}/region/more/unregister")).status_code == 200
    await calls.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
    assert (await get(f"{REST}/status")).json() == []


async def test_invalid_registration_is_rejected(live: Live, memory: Memory) -> None:
    path = f"{REST}/region/ids/register"
    right = {"key": "ids", "offset": 0, "byte_size": 1}
    for body, status, expected_error in (
        (b"", 400, "body.key: Field required"),
        (b"{", 400, "body: Invalid JSON"),
        (b"[]", 400, "body: "),
        (json.dumps(right | {"byte_size": "1"}), 400, "body.byte_size: "),
        (json.dumps({"key": "ids", "offset": 0}), 400, "body.byte_size: Field required"),
        (json.dumps(right | {"key": "../ids"}), 400, "key is '../ids': it is no name of a file"),
        (json.dumps(right | {"byte_size": 2**40}), 413, "byte_size is 1099511627776, all callers'"),
        (b" " * 70_000, 413, "body has 70000 bytes, the limit is 65536"),
    ):
        answer = await live.http.post(path, content=body)
        assert (answer.status_code, expected_error in answer.json()["error"]) == (status, True), (
            answer.text
        )
    assert (await live.http.post(path, json=right)).status_code == 200
    assert (await live.http.post(path, json=right)).status_code == 409
    assert (await live.http.get(f"{REST}/region/other/status")).status_code == 404
    call = stub(live).SystemSharedMemoryRegister
    with pytest.raises(grpc.aio.AioRpcError, match="key is '': it is no name") as caught:
        await call(pb.SystemSharedMemoryRegisterRequest(name="more", byte_size=1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="is registered already") as caught:
        await call(pb.SystemSharedMemoryRegisterRequest(name="ids", key="ids", byte_size=1))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    described = (await live.http.get("/openapi.json")).json()
    operation = described["paths"][f"{REST}/region/{{region}}/register"]["post"]
    assert {"200", "400", "403", "409", "413", "default"} <= set(operation["responses"])
    validate((await live.http.get(f"{REST}/status")).json()[0], "RegionStatus", described)


async def test_browser_pages_cannot_use_regions(live: Live, memory: Memory) -> None:
    memory.put(INPUTS)
    await register(live, memory)
    page = {"Origin": "http://elsewhere.example"}
    for path in ("status", "region/ids/status"):
        assert (await live.http.get(f"{REST}/{path}", headers=page)).status_code == 403
    for path in ("unregister", "region/ids/unregister", "region/more/register"):
        assert (await live.http.post(f"{REST}/{path}", headers=page)).status_code == 403
    infer_request = in_regions(INPUTS, INS, USER)
    for body, headers in ((infer_request.json_body(), {}), infer_request.binary_body()):
        answer = await live.http.post("/v2/models/shop/infer", content=body, headers=headers | page)
        assert answer.status_code == 404
    assert memory.is_untouched()


async def test_region_of_a_removed_file_is_dropped(live: Live, memory: Memory) -> None:
    await register(live, memory)
    shared = live.pipeline.shared_memory
    assert shared is not None
    memory.ids.unlink()
    await until(lambda: list(shared.of(EVERYBODY)) == ["vectors"])


TOKENS: dict[str, dict[str, Any]] = {"es_a": {}, "es_b": {}, "es_boss": {"roles": ["admin"]}}


def written(path: Path, **changes: dict[str, Any]) -> None:
    tokens = {token: keys | changes.get(token, {}) for token, keys in TOKENS.items()}
    lines = [
        json.dumps({"name": token[3:], "sha256": hash_of(token.encode()), **keys})
        for token, keys in tokens.items()
    ]
    path.write_text("\n".join(lines))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


@pytest.mark.parametrize("management_host", ["", "127.0.0.1"])
async def test_regions_are_separate_by_caller(
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    memory: Memory,
    tmp_path: Path,
    management_host: str,
) -> None:
    tokens = tmp_path / "tokens"
    written(tokens)
    access = Authenticator(str(tokens))
    shared = RegionRegistry("/", Limits(), str(memory.folder))
    pipeline = make_pipeline(engine, executor=executor, authenticator=access, shared_memory=shared)
    memory.put(INPUTS)
    bodies = {
        name: json.dumps({"key": name, "offset": offset, "byte_size": 24})
        for name, offset in (("ids", IDS_OFFSET), ("vectors", VECTORS_OFFSET))
    }
    infer = in_regions(INPUTS, INS, {"user": None}).json_body()
    async with serving(pipeline, management_host=management_host) as live:

        async def status_of(token: str, method: str, path: str, body: Any = b"") -> int:
            headers = bearer(token)
            response = await live.http.request(method, path, content=body, headers=headers)
            return response.status_code

        ids = f"{REST}/region/ids"
        rejection_statuses = {"": 401, "es_boss": 403}
        for token, wanted in (rejection_statuses | {"es_a": 200}).items():
            assert await status_of(token, "POST", f"{ids}/register", bodies["ids"]) == wanted
            assert await status_of(token, "GET", f"{REST}/status") == wanted
        assert await status_of("es_a", "POST", "/v2/models/shop/infer", infer) == 200
        assert await status_of("es_b", "POST", "/v2/models/shop/infer", infer) == 404
        assert await status_of("es_b", "GET", f"{ids}/status") == 404
        assert await status_of("es_b", "POST", f"{ids}/register", bodies["ids"]) == 409
        assert await status_of("es_b", "POST", f"{ids}/unregister") == 200
        assert await status_of("es_b", "POST", f"{REST}/unregister") == 200
        assert await status_of("es_b", "POST", f"{ids}/register", bodies["vectors"]) == 200
        calls = stub(live)
        for token, wanted_code in (("", "UNAUTHENTICATED"), ("es_boss", "PERMISSION_DENIED")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await calls.SystemSharedMemoryStatus(
                    pb.SystemSharedMemoryStatusRequest(), metadata=tuple(bearer(token).items())
                )
            assert caught.value.code().name == wanted_code
        for token, key in (("es_a", "ids"), ("es_b", "vectors")):
            metadata = tuple(bearer(token).items())
            status = await calls.SystemSharedMemoryStatus(
                pb.SystemSharedMemoryStatusRequest(), metadata=metadata
            )
            assert [one.key for one in status.regions.values()] == [key]
        written(tokens, es_a={"revoked": True})
        await access.reloader.poll()
        await until(lambda: not shared.of("a"))
        assert list(shared.of("b")) == ["ids"]
        assert await status_of("es_b", "POST", f"{REST}/region/a/register", bodies["ids"]) == 200


async def test_regions_are_rejected_without_shared_memory(
    engine: FakeEngine, executor: ThreadPoolExecutor, memory: Memory
) -> None:
    async with serving(make_pipeline(engine, executor=executor)) as live:
        assert "system_shared_memory" not in (await live.http.get("/v2")).json()["extensions"]
        assert (await live.http.get(f"{REST}/status")).status_code == 404
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(live).SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        for infer in (as_json, as_raw):
            for infer_request in (
                in_regions(INPUTS, INS),
                in_regions(INPUTS, {}, USER),
            ):
                with pytest.raises(RejectedRequestError, match=r"not use \(--shared-memory\)$"):
                    await infer(live, infer_request)
