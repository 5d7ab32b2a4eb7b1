"""Tests of a router's process that opens a version once it has found replicas of each part."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server.gate import Gate
from server.waiting import until
from shard_client.fake_shards import FakeConnection, FakeTime

from embedserve.config import ServeSettings
from embedserve.fanout import shards as shards_module
from embedserve.fanout.parted_version import ExpectedPart
from embedserve.fanout.router_engine import RouterEngine
from embedserve.fanout.shards import Shards
from embedserve.shard_client import replica
from embedserve.shard_client.discovery import DnsShards, OnAddresses
from embedserve.shard_client.shard_connection import Address, ConnectionOptions
from embedserve_proto.embedding_pb2 import Model
from embedserve_store import ModelStore, ModelVersion, TableSpec, publish
from embedserve_store.errors import UnopenedError
from embedserve_store.parts.part import NO_ROWS

PARTS = 2


class FoundShards:
    """The shards of an address file, or of another source, over fake connections.

    Attributes:
        polls: number of polls for missing parts.
        token: file with the token that the shards receive.
        options: options of the newest connection of each part.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, source: str = "") -> None:
        self.connections: dict[int, FakeConnection] = {}  # by port, which is the number of the part
        self.polls = 0
        self._addresses = folder / "shards.json"
        self.write_addresses(PARTS)
        monkeypatch.setattr(shards_module, "ShardConnection", self._connect)
        monkeypatch.setattr(replica, "POLLS_UNANSWERED_MAX", 1000)  # a fake lists its models once
        self.token = folder / "token"
        self.token.write_text("first")
        self.options: dict[int, ConnectionOptions] = {}
        self.shards = Shards(
            ServeSettings(
                str(folder / "store"),
                shards=source or f"file:{self._addresses}",
                shard_token=str(self.token),
            )
        )
        self._missing = self.shards._missing
        monkeypatch.setattr(self.shards, "_missing", self._poll)

    def write_addresses(self, parts: int) -> None:
        addresses = {str(part): [f"a:{part + 1}"] for part in range(parts)}
        self._addresses.write_text(json.dumps(addresses))

    def _poll(self, parts: list[ExpectedPart]) -> str:
        self.polls += 1
        return self._missing(parts)

    def _connect(
        self,
        address: Address,
        options: ConnectionOptions,
        on_ready: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> FakeConnection:
        part = address[1] - 1
        self.options[part] = options
        self.connections[part] = FakeConnection(FakeTime(), address, on_ready, on_end)
        return self.connections[part]

    async def wait_for_two_polls(self, opening: asyncio.Task[Any]) -> None:
        """Returns after two more polls, or once ``opening`` has ended."""
        polls_min = self.polls + 2
        await until(lambda: opening.done() or self.polls >= polls_min)

    def join(self, part: int, version: ModelVersion) -> None:
        assert version.plan.hosts is not None
        manifest = version.whole
        connection = self.connections[part]
        connection.ready()
        connection.list(
            Model(
                model=manifest.model,
                version=manifest.version,
                fingerprint=manifest.fingerprint,
                part=part,
                parts=version.plan.hosts.parts,
            )
        )

    async def open(self, version: ModelVersion) -> RouterEngine:
        """Opens ``version`` once each part has a new connection, which serves it."""
        assert version.plan.hosts is not None
        parts = range(version.plan.hosts.parts)
        self.connections.clear()
        opening = asyncio.create_task(asyncio.to_thread(self.shards.open, version))
        await until(lambda: len(self.connections) == len(parts))
        for part in parts:
            self.join(part, version)
        return await opening


def publish_next(folder: Path, parts: int) -> ModelVersion:
    spec = [TableSpec("user", 8, 4, ("user",), "sum", "float32")]
    weights = {"embedding_bags.user.weight": torch.zeros(8, 4)}
    publish(weights, folder / "store", model="m", tables=spec, hosts=parts)
    return ModelStore(folder / "store", selection=NO_ROWS).load("m")


@pytest.fixture
def version(tmp_path: Path) -> ModelVersion:
    return publish_next(tmp_path, PARTS)


@pytest.fixture
def found(tmp_path: Path, version: ModelVersion, monkeypatch: pytest.MonkeyPatch) -> FoundShards:
    return FoundShards(tmp_path, monkeypatch)


async def test_version_opens_once_each_part_has_a_replica(
    found: FoundShards, version: ModelVersion
) -> None:
    async with found.shards._running():
        opening = asyncio.create_task(asyncio.to_thread(found.shards.open, version))
        for part in range(PARTS):
            await found.wait_for_two_polls(opening)
            assert not opening.done()
            found.join(part, version)
        engine = await opening
        assert [part.part for part in engine.expected_parts] == [0, 1]
        assert found.shards.replicas("m", 1) == [1, 1]


async def test_joins_are_logged_by_the_server_and_not_by_the_check_before(
    found: FoundShards, version: ModelVersion, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with found.shards._running():
        engine = await found.open(version)  # the shards keep it while it is referenced
    assert not caplog.messages
    found.connections.clear()
    starting = asyncio.create_task(found.shards.start())
    await until(lambda: len(found.connections) == PARTS)
    for part in range(PARTS):
        found.join(part, version)
    await starting
    assert caplog.messages == [f"part {i} of 2: a:{i + 1} joined for m@1" for i in range(PARTS)]
    for task in (*found.shards._tasks, *found.shards._discoveries.values()):
        task.cancel()
    del engine


async def test_changed_token_is_sent_on_new_connections(
    found: FoundShards, version: ModelVersion
) -> None:
    async with found.shards._running():
        engine = await found.open(version)  # the shards keep it while it is referenced
        first = dict(found.connections)
        found.token.write_text("second")
        await until(lambda: all(found.connections[part] is not first[part] for part in first))
        for part in range(PARTS):
            assert found.options[part].metadata == [(b"authorization", b"Bearer second")]
            found.join(part, version)
            assert first[part].is_finished
        assert found.shards.replicas("m", 1) == [1, 1]
        del engine


async def test_certificate_of_a_shard_must_have_the_dns_name_of_its_part(
    tmp_path: Path, version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def discover(
        source: DnsShards, parts: int, on_addresses: OnAddresses
    ) -> Coroutine[Any, Any, None]:
        for part in range(parts):
            on_addresses(part, [("10.0.0.1", part + 1)])
        return asyncio.sleep(3600)

    monkeypatch.setattr(shards_module, "discover", discover)
    found = FoundShards(tmp_path, monkeypatch, "dns:shard-{part}:8001")
    async with found.shards._running():
        await found.open(version)
        names = {part: options.server_hostname for part, options in found.options.items()}
    assert names == {0: "shard-0", 1: "shard-1"}


async def test_opening_times_out_and_names_the_missing_part(
    found: FoundShards, version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "OPEN_S_MAX", 0.0)
    async with found.shards._running():
        with pytest.raises(UnopenedError, match="part 0 of 2 has no replica of m@1: a:1 connect"):
            await asyncio.to_thread(found.shards.open, version)


async def test_opening_waits_until_the_address_file_is_readable(
    found: FoundShards, version: ModelVersion, tmp_path: Path
) -> None:
    addresses = tmp_path / "shards.json"
    written = addresses.read_text()
    addresses.write_text("{")
    async with found.shards._running():
        opening = asyncio.create_task(asyncio.to_thread(found.shards.open, version))
        why = await asyncio.to_thread(found.shards.expect_and_check, version)
        assert "shards.json" in why
        assert not opening.done()
        addresses.write_text(written)
        await until(lambda: len(found.connections) == PARTS)
        for part in range(PARTS):
            found.join(part, version)
        assert (await opening).manifest.version == 1


async def test_connections_to_parts_of_no_version_end(
    found: FoundShards, version: ModelVersion, tmp_path: Path
) -> None:
    shards = found.shards
    async with shards._running():
        engine = await found.open(version)
        before = [*found.connections.values()]
        counts = [stats for _, stats in shards.part_counts()]
        found.write_addresses(PARTS + 1)
        following = await found.open(publish_next(tmp_path, PARTS + 1))
        assert not any(one.is_finished for one in before)  # the former version still serves
        del engine
        await until(lambda: all(one.is_finished for one in before))
        assert shards.replicas("m", 1) == []
        assert [stats for _, stats in shards.part_counts()][:PARTS] == counts
        assert not any(one.is_finished for one in found.connections.values())
        found.write_addresses(PARTS)
        del following
        engine = await found.open(publish_next(tmp_path, PARTS))
        assert shards.replicas("m", 3) == [1] * PARTS
        del engine


async def test_stop_during_the_lookup_of_goldens_does_not_wait_for_it(
    found: FoundShards, version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = found.shards._engine(version), Gate()
    monkeypatch.setattr(engine, "warm_up", gate.before(lambda: None))
    checking = asyncio.create_task(found.shards._check([engine], is_shown=False))
    await until(lambda: gate.threads)
    checking.cancel()
    assert [thread.daemon for thread in gate.threads] == [True]
    gate.opened.set()


def test_read_only_ids_of_requests_cause_no_warning(found: FoundShards) -> None:
    found.shards.open_all({})
    torch.set_warn_always(True)  # torch would otherwise warn once in a process
    try:
        torch.from_numpy(np.frombuffer(bytes(8), np.int64))
    finally:
        torch.set_warn_always(False)
