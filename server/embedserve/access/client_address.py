"""Finds the address of a request's client for the log, also behind trusted proxies."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

FORWARDED = b"forwarded"
X_FORWARDED_FOR = b"x-forwarded-for"
FORWARDED_BYTES_MAX = 1024
"""Bytes at the end of either header that are read; the nearest proxy adds its entry there."""
UNIX_SOCKET = "a Unix socket"
PEER = "embedserve.peer"
"""The key of an ASGI scope for the address of the connection's other end."""
_PARAMETER = re.compile(r"\s*([^\s=\"\\]+)\s*=\s*+(?:\"([^\"\\]*)\"|([^\s\"\\]*))\s*")
_PORT = re.compile(r"(\[.*\]|[0-9.]+):[0-9]{1,5}")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def peer_address(transport: asyncio.BaseTransport) -> str:
    """Returns the address, without the port, of the other end of a connection; UNIX_SOCKET if it
    has none."""
    peername = transport.get_extra_info("peername")
    if not isinstance(peername, tuple) or not peername:
        return UNIX_SOCKET
    address = _parsed(str(peername[0]))
    return str(peername[0]) if address is None else str(address)


class ClientAddresses:
    """Finds client addresses: that of the connection, or the one reported by a trusted proxy."""

    def __init__(self, trusted: Iterable[str] = ()) -> None:
        """
        Args:
            trusted: addresses of proxies, and networks such as 10.0.0.0/8.
        """
        self._trusted = [_unmapped(ipaddress.ip_network(one)) for one in trusted]

    def find(self, peer: str, header: Callable[[bytes], bytes | None]) -> str:
        """Returns the address of the client of a request.

        Forwarded (RFC 7239) and X-Forwarded-For count only where ``peer`` is a trusted proxy. They
        are read from their end, where that proxy wrote, to the first address that is not a trusted
        proxy. Untrusted clients may have written the entries before it. A malformed entry ends the
        search at the address after it.

        A proxy that writes one of the headers may pass on the other as the client wrote it. If the
        two give different addresses, neither counts.

        Args:
            peer: address of the connection's other end.
            header: function from a header name in lower case to its value, None if absent. Repeated
                lines are joined with commas.
        """
        if not self._trusted or not self._is_trusted(_parsed(peer)):
            return peer
        addresses = {self._nearest(peer, entries) for entries in _lists(header)}
        return addresses.pop() if len(addresses) == 1 else peer

    def _nearest(self, peer: str, entries: Sequence[str]) -> str:
        """Returns the address at which the search from the end of ``entries`` stops."""
        found = peer
        for entry in reversed(entries):
            address = _parsed(entry)
            if address is None:
                return found
            found = str(address)
            if not self._is_trusted(address):
                return found
        return found

    def _is_trusted(self, address: IpAddress | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


def _unmapped(network: Network) -> Network:
    """Returns the IPv4 network of IPv4-mapped IPv6 addresses, as addresses are read; others as they
    are."""
    mapped = network.network_address
    if isinstance(mapped, ipaddress.IPv6Address) and mapped.ipv4_mapped and network.prefixlen >= 96:
        return ipaddress.IPv4Network((mapped.ipv4_mapped, network.prefixlen - 96))
    return network


def _lists(header: Callable[[bytes], bytes | None]) -> Iterator[list[str]]:
    """Yields the addresses of each header that is present; an entry without an address is ""."""
    forwarded, x_forwarded_for = header(FORWARDED), header(X_FORWARDED_FOR)
    if forwarded is not None:
        yield [_for_parameter(one) for one in _elements(forwarded)]
    if x_forwarded_for is not None:
        yield _elements(x_forwarded_for)


def _elements(value: bytes) -> list[str]:
    """Returns the elements of a list header, without an element that the byte limit may cut."""
    text = value[-FORWARDED_BYTES_MAX:].decode("latin-1")
    elements = [one.strip() for one in text.split(",")]
    return elements if len(value) <= FORWARDED_BYTES_MAX else elements[1:]


def _for_parameter(element: str) -> str:
    """Returns the parameter "for" of an element; "" if it has none or is malformed.

    A quoted comma or semicolon separates like any other. The piece with the closing quote is
    malformed then, so that a quoted value, which may be the client's, is never read as an element.
    """
    found = ""
    for text in filter(None, element.split(";")):
        parameter = _PARAMETER.fullmatch(text)
        if parameter is None:
            return ""
        if parameter[1].lower() == "for":
            found = found or parameter[2] or parameter[3] or ""
    return found


def _parsed(text: str) -> IpAddress | None:
    """Returns the address in ``text``, which may have brackets and a port; None if there is none.
    IPv4-mapped IPv6 addresses become IPv4 addresses."""
    if found := _PORT.fullmatch(text):
        text = found[1]
    if text[:1] == "[" and text[-1:] == "]":
        text = text[1:-1]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
