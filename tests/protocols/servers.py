"""Starts servers in the test's event loop; the tests of a module share them."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from protocols.drivers import PROTOCOLS, Driver
from protocols.shared_memory_formats import SharedMemoryFolder
from server.fake_engine import FakeEngine
from server.fake_models import model_info, ruled_info, unpooled_info
from server.live import make_pipeline, serving

from embedserve.access.authenticator import Authenticator
from embedserve.access.client_address import ClientAddresses
from embedserve.access.grants import hash_of
from embedserve.config import Limits
from embedserve.model_info import ModelInfo
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve.shared_memory.region_registry import RegionRegistry

MATRIX = pytest.mark.asyncio(loop_scope="module")
"""Mark of a module whose tests share servers and an event loop."""


@dataclass(frozen=True)
class Setup:
    """Models and settings of a server.

    Attributes:
        models: descriptions of its models; the first is the default one.
        tokens: settings of each token; without any, no request needs a token.
        slow_ms, sends_timing: settings of its telemetry.
    """

    models: Sequence[ModelInfo] = field(
        default_factory=lambda: [model_info(), ruled_info(), unpooled_info()]
    )
    limits: Limits = field(default_factory=Limits)
    tokens: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    slow_ms: float = 0.0
    sends_timing: bool = False
    trusted_proxies: Sequence[str] = ()
    drain_s: float = 60.0


class Servers:
    """Starts a server for each setup once, and stops all at the end.

    The servers of a module share its event loop, so a test must leave no request in flight.
    """

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._shared_folder = SharedMemoryFolder(folder)
        self._stack = stack
        self._started: dict[tuple[int, str], Driver] = {}

    async def driver(self, protocol: str, setup: Setup) -> Driver:
        """Returns a driver of ``protocol``; ``setup`` is a constant of the module."""
        key = id(setup), PROTOCOLS[protocol].grpc_server
        if key not in self._started:
            self._started[key] = await self._stack.enter_async_context(
                self.own_server(protocol, setup)
            )
        return self._started[key].over(protocol)

    @asynccontextmanager
    async def own_server(self, protocol: str, setup: Setup) -> AsyncIterator[Driver]:
        """Yields a driver of a server for one test; stops the server when the block ends."""
        engines = [FakeEngine(info, seed=seed) for seed, info in enumerate(setup.models)]
        authenticator = None
        if setup.tokens:
            path = self._folder / f"tokens-{id(setup)}"
            path.write_text("\n".join(_token_line(*one) for one in setup.tokens.items()))
            authenticator = Authenticator(str(path))
        with ThreadPoolExecutor(1) as executor:
            pipeline = make_pipeline(
                *engines,
                executor=executor,
                limits=setup.limits,
                authenticator=authenticator,
                shared_memory=RegionRegistry("/", setup.limits, str(self._folder)),
            )
            pipeline.telemetry = RequestTelemetry(setup.slow_ms, sends_timing=setup.sends_timing)
            pipeline.addresses = ClientAddresses(setup.trusted_proxies)
            grpc_server = PROTOCOLS[protocol].grpc_server
            async with serving(pipeline, setup.drain_s, grpc_server) as live:
                try:
                    yield Driver(protocol, live, engines, self._shared_folder)
                finally:
                    for engine in engines:
                        engine.release()


def _token_line(token: str, settings: Mapping[str, Any]) -> str:
    return json.dumps({"name": token[3:], "sha256": hash_of(token.encode()), **settings})
