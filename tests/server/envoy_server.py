"""An Envoy with gRPC over fake engines in it, and what tests see of it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import grpc
from server.channels import OWN_CONNECTION
from server.envoy_app import VARIABLE
from server.fake_engine import FakeEngine, Lookup
from server.live import free_port
from server.python import environment

from embedserve.config import Limits
from embedserve.pyvoy_envoy import envoy_command, envoy_environment
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

READY_S_MAX = 20


class Envoy:
    """A running Envoy.

    Attributes:
        target: HOST:PORT of its gRPC.
    """

    def __init__(self, target: str, control: Connection[Any, Any]) -> None:
        self.target = target
        self._control = control

    def ask(self, name: str, *arguments: object) -> Any:
        """What the method of envoy_app.Controls returns."""
        self._control.send((name, arguments))
        answer = self._control.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


class RemoteEngine(FakeEngine):
    """The engine of the service in an Envoy: its rows are equal to this one's."""

    def __init__(self, envoy: Envoy) -> None:
        self.envoy = envoy
        super().__init__()

    def hold(self) -> None:
        self.envoy.ask("hold")

    def release(self) -> None:
        self.envoy.ask("release")

    @property
    def lookups(self) -> list[Lookup]:  # type: ignore[override]
        answer: list[Lookup] = self.envoy.ask("lookups")
        return answer

    @lookups.setter
    def lookups(self, value: list[Lookup]) -> None:
        assert value == []  # as FakeEngine begins


class RemoteLive:
    """A service in an Envoy, and clients of it: what server.live.Live is for grpcio."""

    def __init__(self, envoy: Envoy, channel: grpc.aio.Channel) -> None:
        self.envoy = envoy
        self.grpc_target = envoy.target
        self.channel = channel
        self.stub = EmbeddingServiceStub(channel)

    def queued(self) -> int:
        answer: int = self.envoy.ask("queued")
        return answer

    def outcomes(self, protocol: str) -> dict[str, int]:
        assert protocol == "grpc"
        answer: dict[str, int] = self.envoy.ask("outcomes")
        return answer


@contextmanager
def running_envoy(folder: Path) -> Iterator[Envoy]:
    port = free_port()
    address = str(folder / "control")
    command = envoy_command("server.envoy_app:app", "127.0.0.1", port, folder)
    with Listener(address) as listener:
        process = subprocess.Popen(
            command, env=envoy_environment() | {VARIABLE: address, **_path()}, cwd=folder
        )
        try:
            with listener.accept() as control:
                envoy = Envoy(f"127.0.0.1:{port}", control)
                with grpc.insecure_channel(envoy.target, options=OWN_CONNECTION) as channel:
                    grpc.channel_ready_future(channel).result(READY_S_MAX)
                yield envoy
        finally:
            process.terminate()
            process.wait(READY_S_MAX)


def _path() -> dict[str, str]:
    return {"PYTHONPATH": environment()["PYTHONPATH"]}


def reset(envoy: Envoy, limits: Limits | None = None) -> RemoteEngine:
    """A new service in ``envoy``, over the engine that this gives."""
    envoy.ask("reset", limits or Limits())
    return RemoteEngine(envoy)
