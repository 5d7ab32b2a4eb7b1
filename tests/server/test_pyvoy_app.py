"""The server inside Envoy, where Envoy does not do as it should; the rest is in tests/e2e."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server.fake_engine import FakeEngine
from server.live import make_service

from embedserve.config import ServeSettings
from embedserve.frontends.grpc_asgi import GrpcApp
from embedserve.ports import claim_ports
from embedserve.pyvoy_app import EnvoyFrontend
from embedserve.pyvoy_host import VARIABLE, HandedOver, read_handed_over


def given(folder: Path) -> HandedOver:
    settings = ServeSettings(store="store", model=("shop@7",), grpc_server="pyvoy")
    return HandedOver(settings, "127.0.0.1", 1, 2, 3, 4, 5, str(folder), 6.5)


def test_what_is_handed_over_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    monkeypatch.setenv(VARIABLE, msgspec.json.encode(given(tmp_path)).decode())
    assert read_handed_over() == given(tmp_path)


async def test_a_drain_does_without_the_admin_interface(
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = GrpcApp(make_service(engine, executor=executor))
    ports = claim_ports("127.0.0.1", 0, 0)
    frontend = EnvoyFrontend(app, given(tmp_path / "gone"), ports, lambda: None)
    start = time.monotonic()
    await frontend.stop(10)
    assert time.monotonic() - start < 5
    assert caplog.text.count("draining without Envoy's help") == 2
    ports.close()


async def test_a_port_on_which_nobody_listens_is_waited_for(
    engine: FakeEngine, executor: ThreadPoolExecutor, tmp_path: Path
) -> None:
    app = GrpcApp(make_service(engine, executor=executor))
    ports = claim_ports("127.0.0.1", 0, 0)
    listening = []

    def listen() -> None:
        listening.append(claim_ports("127.0.0.1", 0, ports.grpc))

    await EnvoyFrontend(app, given(tmp_path), ports, listen).start()
    assert len(listening) == 1  # the port was free when Envoy was told to take it
    listening[0].close()
    ports.close()
