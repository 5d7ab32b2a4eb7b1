"""Tests of holding deltas over REST: who may hold them, for which models, and the responses."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.api.clients import client_of
from server.fake_admin import FakeAdmin
from server.fake_deltas import at_seq
from server.fake_engine import FakeEngine, model_info
from server.live import make_pipeline
from server.openapi import validate
from server.waiting import until

from embedserve.access.authenticator import Authenticator
from embedserve.access.grants import hash_of
from embedserve.api import delta_hold
from embedserve.api.management import management_app
from embedserve.deltas.status import SharedDeltaState

HOLD, RESUME = "/admin/deltas/hold", "/admin/deltas/go-on"
SHOP = {"model": "shop"}


class Server:
    """Management routes of a model at seq 5 and of one without deltas, with an applier that polls
    the store when the test says so."""

    def __init__(
        self, executor: ThreadPoolExecutor, access: Authenticator | None, *, has_admin: bool
    ) -> None:
        shop = at_seq(model_info(), 5)
        assert shop.deltas is not None
        self.shared: SharedDeltaState = shop.deltas
        films = FakeEngine(model_info("films", {"user": (7, 2)}))
        pipeline = make_pipeline(FakeEngine(shop), films, executor=executor, authenticator=access)
        app = management_app(pipeline, FakeAdmin() if has_admin else None)
        self.client = client_of(app)

    def poll(self) -> None:
        status = self.shared.status
        applied = replace(status.read().applied, seq=5)
        state = "held" if self.shared.hold.is_set else "following"
        now = replace(status.read(), applied=applied, state=state, looked_at=time.time())
        status.write(now)

    @asynccontextmanager
    async def polling(self) -> AsyncIterator[None]:
        async def run() -> None:
            while True:
                self.poll()
                await asyncio.sleep(0.005)

        task = asyncio.create_task(run())
        try:
            yield
        finally:
            task.cancel()

    async def post(self, path: str, body: Any = SHOP, token: str = "") -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return await self.client.post(path, json=body, headers=headers)


@pytest.fixture
async def server(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Server]:
    monkeypatch.setattr(delta_hold, "EFFECT_S_MAX", 3600.0)  # more than a test may take
    server = Server(executor, None, has_admin=True)
    async with server.client:
        yield server


async def test_deltas_are_held_and_resumed(server: Server) -> None:
    described = (await server.client.get("/openapi.json")).json()
    async with server.polling():
        for path, state in [(HOLD, "held")] * 2 + [(RESUME, "following")] * 2:  # twice is like once
            response = await server.post(path)
            assert response.status_code == 200
            assert response.json() == {"model": "shop", "state": state, "seq": 5}
            validate(response.json(), "DeltaProgress", described)
            assert server.shared.hold.is_set == (state == "held")
            shown = (await server.client.get("/models/shop")).json()
            assert shown["deltas"]["state"] == state
            validate(shown, "Model", described)


async def test_response_waits_for_a_poll_that_began_with_the_hold(server: Server) -> None:
    """Checks that a response does not take the state of an earlier hold for that of the new one."""
    server.shared.hold.set(True)
    server.poll()
    server.shared.hold.set(False)
    for path, is_held in ((HOLD, True), (RESUME, False)):
        response = asyncio.create_task(server.post(path))
        await until(lambda: server.shared.hold.is_set == is_held)  # noqa: B023
        done, _ = await asyncio.wait([response], timeout=0.2)
        assert not done
        server.poll()
        assert (await response).json()["state"] == ("held" if is_held else "following")


async def test_response_waits_for_the_step_in_progress(server: Server) -> None:
    response = asyncio.create_task(server.post(HOLD))
    await until(lambda: server.shared.hold.is_set)
    status = server.shared.status
    status.write(replace(status.read(), state="catching up", looked_at=time.time()))
    done, _ = await asyncio.wait([response], timeout=0.2)
    assert not done
    server.poll()
    assert (await response).json()["state"] == "held"


async def test_response_does_not_wait_for_a_reversed_hold(server: Server) -> None:
    first = asyncio.create_task(server.post(HOLD))
    await until(lambda: server.shared.hold.is_set)
    server.shared.hold.set(False)
    assert (await first).json()["state"] == "catching up"


async def test_version_switched_to_during_a_hold_request_is_held(server: Server) -> None:
    other = at_seq(model_info(), 5).deltas
    assert other is not None
    served = [server.shared]
    switching = asyncio.create_task(delta_hold._set_and_wait(lambda: served[-1], is_held=True))
    await until(lambda: server.shared.hold.is_set)
    assert not other.hold.is_set
    served.append(other)
    await until(lambda: other.hold.is_set)
    other.status.write(replace(other.status.read(), state="held", looked_at=time.time()))
    await switching


async def test_current_state_is_returned_without_an_applier(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_hold, "EFFECT_S_MAX", 0.05)
    server.shared.status.stall("the process that applies deltas was ended by SIGKILL")
    response = await server.post(HOLD)
    assert (response.status_code, response.json()["state"]) == (200, "stalled")
    assert server.shared.hold.is_set


@pytest.mark.parametrize("path", [HOLD, RESUME])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "shoes"}, 404, "model is 'shoes': this server has shop, films"),
        ({"model": "shop@9"}, 404, "version is 9: the versions of shop are 7"),
        ({"model": "films"}, 400, "model is 'films', which follows no deltas (serve --deltas foll"),
        ({"model": ""}, 400, "body.model: "),
        ({"model": "x" * 1001}, 400, "body.model: "),
        ({"model": 7}, 400, "body.model: "),
        ({}, 400, "body.model: "),
        ([], 400, "body: "),
    ],
)
async def test_invalid_hold_requests_are_rejected(
    server: Server, path: str, body: Any, status: int, message: str
) -> None:
    response = await server.post(path, body)
    assert (response.status_code, response.json()["error"]["message"][: len(message)]) == (
        status,
        message,
    )
    assert not server.shared.hold.is_set


async def test_hold_requests_with_cross_site_content_types_are_rejected(server: Server) -> None:
    for headers in ({"Content-Type": "text/plain"}, {}):
        response = await server.client.post(HOLD, content=json.dumps(SHOP), headers=headers)
        assert response.status_code == 415
    assert not server.shared.hold.is_set


async def test_hold_routes_are_missing_without_the_admin_service(
    executor: ThreadPoolExecutor,
) -> None:
    server = Server(executor, None, has_admin=False)
    async with server.client:
        assert {(await server.post(path)).status_code for path in (HOLD, RESUME)} == {404}
    assert not server.shared.hold.is_set


async def test_only_administrators_can_hold_deltas(
    executor: ThreadPoolExecutor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grants = [
        {"name": role, "sha256": hash_of(f"es_{role}".encode()), "roles": [role]}
        for role in ("embed", "admin")
    ]
    (tmp_path / "tokens").write_text("\n".join(map(json.dumps, grants)))
    server = Server(executor, Authenticator(str(tmp_path / "tokens")), has_admin=True)
    async with server.client, server.polling():
        for is_held, path in ((True, HOLD), (False, RESUME)):
            server.shared.hold.set(not is_held)
            for token, status in (("", 401), ("es_wrong", 401), ("es_embed", 403)):
                assert (await server.post(path, token=token)).status_code == status
                # The response does not reveal which models exist either.
                other = await server.post(path, {"model": "shoes"}, token)
                assert (other.status_code, "shop" in other.text) == (status, False)
            assert server.shared.hold.is_set == (not is_held)
            with caplog.at_level(logging.INFO, "embedserve.api.delta_hold"):
                assert (await server.post(path, token="es_admin")).status_code == 200
            assert server.shared.hold.is_set == is_held
    assert [one.message for one in caplog.records if one.name == "embedserve.api.delta_hold"] == [
        "shop: deltas hold, as requested by 'admin'",
        "shop: deltas go-on, as requested by 'admin'",
    ]
