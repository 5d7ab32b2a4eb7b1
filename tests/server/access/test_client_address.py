"""Tests of client addresses: the connection's, or that from a trusted proxy's headers."""

import time

import pytest

from embedserve.access.client_address import (
    FORWARDED,
    FORWARDED_BYTES_MAX,
    X_FORWARDED_FOR,
    ClientAddresses,
)

PROXY = "10.0.0.1"
ADDRESSES = ClientAddresses(["10.0.0.0/8", "fd00::/8"])


def client_address(peer: str = PROXY, **headers: str) -> str:
    """Returns the address found with these headers (x_forwarded_for, forwarded)."""
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return ADDRESSES.find(peer, given.get)


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        (" 192.0.2.7:4711 ", "192.0.2.7"),
        ("2001:db8::7", "2001:db8::7"),
        ("[2001:DB8::7]", "2001:db8::7"),
        ("[2001:db8::7]:4711", "2001:db8::7"),
        ("[2001:db8::77", PROXY),
        ("2001:db8::7]", PROXY),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("fe80::1%eth0", "fe80::1"),
        ("192.0.2.7, 10.1.1.1, fd00::9", "192.0.2.7"),
        ("198.51.100.9, 192.0.2.7, 10.1.1.1", "192.0.2.7"),  # addresses from the client are ignored
        ("10.1.1.1", "10.1.1.1"),  # only proxies
        ("unknown, 10.1.1.1", "10.1.1.1"),
        ("192.0.2.7, unknown", PROXY),
        ("", PROXY),
        (",", PROXY),
        ("192.0.2.7, ", PROXY),
        ("evil\nline", PROXY),
    ],
)
def test_x_forwarded_for_of_a_trusted_proxy_is_used(value: str, address: str) -> None:
    assert client_address(x_forwarded_for=value) == address
    assert client_address(peer="203.0.113.5", x_forwarded_for=value) == "203.0.113.5"
    assert ClientAddresses().find(PROXY, {X_FORWARDED_FOR: value.encode()}.get) == PROXY


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("for=192.0.2.7", "192.0.2.7"),
        ('For="[2001:db8:cafe::17]:4711"', "2001:db8:cafe::17"),
        ("proto=http;for=192.0.2.7;by=10.0.0.1", "192.0.2.7"),
        ("for=192.0.2.7, for=10.2.2.2;proto=https", "192.0.2.7"),
        ("for=192.0.2.7, proto=https", PROXY),
        ('for=192.0.2.7, for="";proto=https', PROXY),
        ("for=_hidden, for=10.2.2.2", "10.2.2.2"),
        ("xfor=192.0.2.7", PROXY),
        ('for=192.0.2.7;host="example.com:80" ; by="[fd00::1]";', "192.0.2.7"),
        ('for=192.0.2.7;host="x,for=6.6.6.6;"', PROXY),  # the quoted host is the client's
        ('for=192.0.2.7;host="x,for=6.6.6.6,"', PROXY),
        (r'for=192.0.2.7;host="x\",for=6.6.6.6;y=\"z"', PROXY),
        ('host="x;for=6.6.6.6;";for=192.0.2.7', PROXY),
        ("", PROXY),
    ],
)
def test_forwarded_header_of_a_trusted_proxy_is_used(value: str, address: str) -> None:
    assert client_address(forwarded=value) == address
    assert client_address(peer="203.0.113.5", forwarded=value) == "203.0.113.5"


@pytest.mark.parametrize(
    ("forwarded", "x_forwarded_for", "address"),
    [
        ("for=192.0.2.7", "192.0.2.7", "192.0.2.7"),
        ("for=198.51.100.9, for=192.0.2.7;proto=https", "192.0.2.7, 10.2.2.2", "192.0.2.7"),
        ("for=198.51.100.9", "192.0.2.7", PROXY),
        ("for=192.0.2.7", "198.51.100.9", PROXY),
        ("for=_hidden", "192.0.2.7", PROXY),
        ("", "192.0.2.7", PROXY),
        ("for=192.0.2.7", "", PROXY),
    ],
)
def test_contradicting_forwarded_headers_are_ignored(
    forwarded: str, x_forwarded_for: str, address: str
) -> None:
    """Rejects both headers: the proxy wrote one of them, and the client perhaps the other."""
    assert client_address(forwarded=forwarded, x_forwarded_for=x_forwarded_for) == address


def test_trusted_proxy_may_be_written_as_a_mapped_address() -> None:
    for trusted in ("::ffff:10.0.0.1", "::ffff:10.0.0.0/104", "::ffff:0:0/96"):
        header = {X_FORWARDED_FOR: b"192.0.2.7"}.get
        assert ClientAddresses([trusted]).find(PROXY, header) == "192.0.2.7", trusted


def test_one_ipv6_address_may_be_trusted() -> None:
    addresses, header = ClientAddresses(["fd00::1"]), {X_FORWARDED_FOR: b"192.0.2.7"}.get
    assert addresses.find("fd00::1", header) == "192.0.2.7"
    assert addresses.find("fd00::2", header) == "fd00::2"


def test_unix_socket_peer_is_no_trusted_proxy() -> None:
    assert client_address(peer="a Unix socket", x_forwarded_for="192.0.2.7") == "a Unix socket"


def test_address_cut_by_the_limit_is_not_used() -> None:
    value = "198.151.100.177" + ", 10.1.1.1" * 101
    assert len(value) == FORWARDED_BYTES_MAX + 1
    assert client_address(x_forwarded_for=value) == "10.1.1.1"
    assert client_address(x_forwarded_for=value[1:]) == "98.151.100.177"


def test_long_forwarded_header_is_parsed_quickly_from_its_end() -> None:
    ours = "192.0.2.7"
    assert client_address(x_forwarded_for="198.51.100.9," * 100_000 + ours) == ours
    assert client_address(x_forwarded_for="9" * 1_000_000) == PROXY
    hostile = [b"for=" * 250_000, b'for="' * 200_000, b";" * 1_000_000, b"for=;" * 200_000]
    hostile.append(b"for=" + b" " * (FORWARDED_BYTES_MAX - 5) + b'"')
    start_s = time.thread_time()
    for value in hostile * 200:
        assert ADDRESSES.find(PROXY, {FORWARDED: value}.get) == PROXY
        assert ADDRESSES.find(PROXY, {FORWARDED: value[:FORWARDED_BYTES_MAX]}.get) == PROXY
    assert time.thread_time() - start_s < 1.0
