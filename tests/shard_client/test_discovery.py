"""Tests of the sources of shard addresses, and of invalid addresses."""

import asyncio
import json
import logging
import os
import socket
from pathlib import Path

import pytest
from server.gate import Gate
from server.waiting import WAIT_S_MAX, until

from embedserve import file_reloader
from embedserve.config import ServeSettings
from embedserve.processes import serve
from embedserve.shard_client import discovery
from embedserve.shard_client.discovery import (
    DnsDiscovery,
    DnsShards,
    FileShards,
    RayShards,
    discover,
    follow_file,
    parse_address,
    parse_shards,
    read_shards,
    resolve,
)
from embedserve.shard_client.shard_connection import Address

DNS = DnsShards("dlrm-{part}", 8001)


def test_address_sources_are_parsed() -> None:
    assert parse_shards("dns:dlrm-{part}.ns.svc:8001") == DnsShards("dlrm-{part}.ns.svc", 8001)
    assert parse_shards("file:/etc/shards.json") == FileShards("/etc/shards.json")
    assert parse_shards("ray:shop") == RayShards("shop")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "expected dns:NAME"),
        ("file:", "expected dns:NAME"),
        ("ray:", "expected dns:NAME"),
        ("etcd:x", "file:PATH or ray:NAME"),
        ("http:dlrm-{part}:8001", "expected dns:NAME"),
        ("dns:dlrm:8001", "lacks {part}"),
        ("dns:dlrm-{part}", "is not HOST:PORT"),
        ("dns:dlrm-{part}:", "has no port from 1 to 65535"),
        ("dns:dlrm-{part}:0", "has no port"),
        ("dns:dlrm-{part}:70000", "has no port"),
        ("dns:dlrm-{part}:000001800111", "has no port"),
        ("dns:dlrm-{part}:1e3", "has no port"),
        ("dns:dl rm-{part}:1", "is not HOST:PORT"),
    ],
)
def test_invalid_sources_are_named_in_the_error(value: str, reason: str) -> None:
    with pytest.raises(ValueError, match="--shards is") as caught:
        parse_shards(value)
    assert repr(value) in str(caught.value)
    assert reason in str(caught.value)


def test_addresses_are_parsed() -> None:
    assert parse_address("h:1") == ("h", 1)
    assert parse_address("[::1]:80") == ("::1", 80)
    for wrong in ("::1:80", ":80", "h", "[]:1", "h:-1", "h:²", "h:\u0661", "[::1:80", "::1]:80"):
        with pytest.raises(ValueError, match="'"):
            parse_address(wrong)


def write(path: Path, content: object) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(content if isinstance(content, str) else json.dumps(content))
    os.replace(scratch, path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ([], "is not an object of parts"),
        ({"0": []}, "missing or unknown: 1"),
        ({"0": [], "1": [], "x": []}, "missing or unknown: x"),
        ({"0": [], "1": "h:1"}, "part 1 is not a list"),
        ({"0": [1], "1": []}, "part 0 is not a list"),
        ({"0": ["h"], "1": []}, "part 0: 'h' is not HOST:PORT"),
    ],
)
def test_malformed_address_files_are_named_in_the_error(
    tmp_path: Path, content: object, reason: str
) -> None:
    path = tmp_path / "shards.json"
    write(path, content)
    with pytest.raises(ValueError, match=r"shards\.json") as caught:
        read_shards(str(path), 2)
    assert reason in str(caught.value)


async def test_address_file_changes_are_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "shards.json"
    write(path, {"0": ["a:1", "b:1", "a:1"], "1": ["c:1"]})
    found: list[tuple[int, list[Address]]] = []
    reloader = follow_file(FileShards(str(path)), 2, lambda *one: found.append(one))
    assert found == [(0, [("a", 1), ("b", 1)]), (1, [("c", 1)])]
    found.clear()
    write(path, {"0": ["a:1", "b:1"], "1": ["d:1"]})
    await reloader.poll()
    assert found == [(0, [("a", 1), ("b", 1)]), (1, [("d", 1)])]
    found.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            write(path, "{")
            await reloader.poll()
        path.unlink()
        await reloader.poll()
    assert found == []
    assert caplog.text.count("is not JSON") == 1
    write(path, {"0": [], "1": ["d:1"]})
    await reloader.poll()
    assert found == [(0, []), (1, [("d", 1)])]


def test_missing_address_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="--shards"):
        follow_file(FileShards(str(tmp_path / "none")), 1, print)


async def test_dns_changes_and_failures_are_followed(caplog: pytest.LogCaptureFixture) -> None:
    answers: dict[str, list[Address] | OSError] = {
        "dlrm-0": [("10.0.0.1", 8001)],
        "dlrm-1": OSError("no such name"),
    }

    async def resolve(host: str, port: int) -> list[Address]:
        assert port == 8001
        answer = answers[host]
        if isinstance(answer, OSError):
            raise answer
        return answer

    found: list[tuple[int, list[Address]]] = []
    discovered = DnsDiscovery(DNS, 2, lambda *one: found.append(one), resolve)
    with caplog.at_level(logging.INFO):
        for part in (0, 1) * 3:
            await discovered.poll_part(part)
    assert found == [(0, [("10.0.0.1", 8001)])] * 3
    assert caplog.text.count("part 1: cannot resolve dlrm-1: no such name") == 1
    answers["dlrm-1"] = [("10.0.0.2", 8001)]
    answers["dlrm-0"] = OSError("the name server is gone")
    with caplog.at_level(logging.INFO):
        for part in (0, 1) * 2:
            await discovered.poll_part(part)
    assert found[3:] == [(1, [("10.0.0.2", 8001)])] * 2
    assert caplog.text.count("dlrm-1 is resolved again") == 1


async def test_names_are_resolved_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "DNS_S", 3600.0)
    info = socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8001)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [info])
    found: dict[int, list[Address]] = {}
    running = asyncio.create_task(discover(DNS, 2, found.__setitem__))
    await until(lambda: len(found) == 2)
    assert found == {part: [("10.0.0.1", 8001)] for part in range(2)}
    running.cancel()


@pytest.mark.parametrize(
    ("found", "addresses"),
    [
        (["::2", "10.0.0.2", "::1", "10.0.0.1"], ["10.0.0.1", "10.0.0.2"]),
        (["::2", "::1"], ["::1", "::2"]),
    ],
)
async def test_replicas_with_addresses_of_both_families_count_once(
    found: list[str], addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = {True: socket.AF_INET6, False: socket.AF_INET}
    infos = [(family[":" in one], socket.SOCK_STREAM, 6, "", (one, 8001)) for one in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
    assert await resolve("dlrm-0", 8001) == [(one, 8001) for one in addresses]


async def test_hanging_resolution_holds_up_no_other_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "DNS_S", 0.01)
    gate, polls = Gate(), asyncio.Semaphore(0)
    monkeypatch.setattr(socket, "getaddrinfo", gate.before(lambda *_, **__: []))

    async def resolve_second(host: str, port: int) -> list[Address]:
        if host == "dlrm-0":
            return await resolve(host, port)
        polls.release()
        return []

    running = asyncio.create_task(DnsDiscovery(DNS, 2, lambda *_: None, resolve_second).run())
    try:
        for _ in range(3):
            await asyncio.wait_for(polls.acquire(), WAIT_S_MAX)
        await until(lambda: gate.threads)
        assert [thread.daemon for thread in gate.threads] == [True]
    finally:
        running.cancel()
        gate.opened.set()


async def test_loopback_address_is_resolved() -> None:
    assert ("127.0.0.1", 8001) in await resolve("127.0.0.1", 8001)


async def test_discoveries_poll_until_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "DNS_S", 0.01)
    monkeypatch.setattr(file_reloader, "POLL_S", 0.01)
    path = tmp_path / "shards.json"
    write(path, {"0": []})
    second = asyncio.Event()
    calls = 0

    async def resolve(host: str, port: int) -> list[Address]:
        nonlocal calls
        calls += 1
        return [("h", calls)]

    def on_addresses(part: int, addresses: list[Address]) -> None:
        if addresses == [("h", 2)]:
            second.set()

    for running in (
        DnsDiscovery(DNS, 1, on_addresses, resolve).run(),
        discover(FileShards(str(path)), 1, on_addresses),
    ):
        second.clear()
        task = asyncio.create_task(running)
        await asyncio.sleep(0)
        write(path, {"0": ["h:2"]})
        await asyncio.wait_for(second.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_malformed_shards_setting_is_reported_before_the_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "set_up_logging", lambda *_: None)  # would outlast the test
    with pytest.raises(ValueError, match=r"^--shards is 'dns:shop:8001': the name lacks"):
        serve.serve(ServeSettings(str(tmp_path / "no store"), shards="dns:shop:8001"))
