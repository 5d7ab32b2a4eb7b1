"""Discovery of shards: the addresses of each part's replicas, from DNS or from a file.

``--shards`` names the source: ``dns:NAME-{part}:PORT``, ``file:PATH``, or ``ray:NAME``, for which
another process writes a file (processes/ray_backend/address_follower.py). Addresses that were found
once stay in use while a source fails.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from embedserve.file_reloader import FileReloader, poll_all
from embedserve.periodic import repeat
from embedserve.shard_client.shard_connection import Address, look_up_host

logger = logging.getLogger(__name__)

DNS_S = 2.0
"""Seconds between two resolutions of the names."""
PART = "{part}"
EXPECTED = "expected dns:NAME-{part}:PORT, file:PATH or ray:NAME"

OnAddresses = Callable[[int, list[Address]], None]
"""Takes the number of a part and the addresses of its replicas, which may be those that it has;
``PartClient.set_addresses``."""
Resolve = Callable[[str, int], Awaitable[list[Address]]]
"""Returns the addresses of a host name and port. Raises OSError."""


@dataclass(frozen=True)
class DnsShards:
    """Shards whose addresses are those of a DNS name for each part.

    Attributes:
        name: host name with ``{part}``.
        port: port of every replica.
    """

    name: str
    port: int


@dataclass(frozen=True)
class FileShards:
    """Shards whose addresses are in a JSON file: ``{"0": ["host:port"], "1": …}``.

    Attributes:
        path: path of the file, which is read again when it changes.
    """

    path: str


@dataclass(frozen=True)
class RayShards:
    """Shards that `embedserve cluster --backend ray` has placed in a Ray cluster.

    Attributes:
        name: their name there.
    """

    name: str


def parse_shards(value: str) -> DnsShards | FileShards | RayShards:
    """Parses the value of ``--shards``.

    Raises:
        ValueError: the value is malformed; the message names it.
    """
    kind, _, rest = value.partition(":")
    if kind == "file" and rest:
        return FileShards(rest)
    if kind == "ray" and rest:
        return RayShards(rest)
    if kind != "dns":
        raise ValueError(f"--shards is {value!r}, {EXPECTED}")
    try:
        name, port = parse_address(rest)
    except ValueError as error:
        raise ValueError(f"--shards is {value!r}: {error}; {EXPECTED}") from error
    if PART not in name:
        raise ValueError(f"--shards is {value!r}: the name lacks {PART}; {EXPECTED}")
    return DnsShards(name, port)


def parse_address(value: str) -> Address:
    """Parses HOST:PORT; an IPv6 address is in brackets.

    Raises:
        ValueError: the value is malformed; the message names it.
    """
    host, _, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{value!r} is an IPv6 address without brackets")
    if not host or any(character.isspace() for character in host):
        raise ValueError(f"{value!r} is not HOST:PORT")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise ValueError(f"{value!r} has no port from 1 to 65535")
    return host, int(port)


def read_shards(path: str, part_count: int) -> list[list[Address]]:
    """Reads the addresses of the replicas of each part from a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: its content is malformed, or names other parts; the message says which.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not an object of parts")
    expected = [str(part) for part in range(part_count)]
    if wrong := set(content).symmetric_difference(expected):
        shown = ", ".join(sorted(wrong)[:5])
        raise ValueError(
            f"{path} must have the parts 0 to {part_count - 1}; missing or unknown: {shown}"
        )
    return [_read_part(path, part, content[part]) for part in expected]


def write_shards(path: Path, addresses: Sequence[Sequence[str]]) -> None:
    """Writes the addresses (HOST:PORT) of the replicas of each part, for ``read_shards``. A reader
    finds the former file or this one, both whole."""
    written = path.with_suffix(".new")
    written.write_text(json.dumps(dict(enumerate(addresses))))
    written.replace(path)


def _read_part(path: str, part: str, values: object) -> list[Address]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{path}: part {part} is not a list of HOST:PORT")
    try:
        return list(dict.fromkeys(map(parse_address, values)))
    except ValueError as error:
        raise ValueError(f"{path}: part {part}: {error}") from error


async def resolve(host: str, port: int) -> list[Address]:
    """Returns the addresses of a host name: the IPv4 ones if it has any, since a replica with
    an address of each family would count twice. Raises OSError."""
    found = await look_up_host(host, port)
    ipv4 = [one for one in found if one[0] == socket.AF_INET]
    return sorted({(str(address[0]), port) for *_, address in ipv4 or found})


class DnsDiscovery:
    """Resolves the name of each part periodically."""

    def __init__(
        self,
        source: DnsShards,
        part_count: int,
        on_addresses: OnAddresses,
        resolve: Resolve = resolve,
    ) -> None:
        """
        Args:
            on_addresses: called for each part that is resolved.
        """
        self._source = source
        self._on_addresses = on_addresses
        self._resolve = resolve
        self._faults = [""] * part_count

    async def poll_part(self, part: int) -> None:
        """Resolves the name of a part. If that fails, the former addresses stay."""
        name = self._source.name.replace(PART, str(part))
        try:
            found = await self._resolve(name, self._source.port)
        except (OSError, UnicodeError) as error:
            if str(error) != self._faults[part]:
                logger.warning("part %d: cannot resolve %s: %s", part, name, error)
            self._faults[part] = str(error)
            return
        if self._faults[part]:
            logger.info("part %d: %s is resolved again", part, name)
            self._faults[part] = ""
        self._on_addresses(part, found)

    async def run(self) -> None:
        """Resolves each name immediately and then every DNS_S, until it is cancelled. A resolution
        that hangs holds up no other part."""
        await asyncio.gather(*map(self._follow, range(len(self._faults))))

    async def _follow(self, part: int) -> None:
        await self.poll_part(part)
        await repeat(DNS_S, partial(self.poll_part, part))


def follow_file(
    source: FileShards, part_count: int, on_addresses: OnAddresses
) -> FileReloader[list[list[Address]]]:
    """Reads the addresses from a file, for ``on_addresses``; the reloader reads them again when it
    changes.

    Raises:
        OSError: the file cannot be read.
        ValueError: from ``read_shards``.
    """

    def adopt(found: list[list[Address]]) -> None:
        for part, addresses in enumerate(found):
            on_addresses(part, addresses)

    read = partial(read_shards, source.path, part_count)
    return FileReloader("--shards", [source.path], read, adopt)


def discover(
    source: DnsShards | FileShards, part_count: int, on_addresses: OnAddresses
) -> Coroutine[object, object, None]:
    """Returns the discovery of a source, which runs as a task until it is cancelled.

    Raises:
        OSError, ValueError: as ``follow_file``.
    """
    if isinstance(source, DnsShards):
        return DnsDiscovery(source, part_count, on_addresses).run()
    return poll_all([follow_file(source, part_count, on_addresses)])
