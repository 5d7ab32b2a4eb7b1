"""Parses server addresses; the REST and the gRPC clients accept the same formats.

"127.0.0.1:8001", "http://127.0.0.1:8001" and "https://host" mean the same to both. The default port
is 80 or 443. "unix:/path" is a Unix socket on the same host. A gRPC client also accepts gRPC's own
targets ("dns:///host:8001").
"""

import re
from urllib.parse import SplitResult, urlsplit

PORTS = {"http": 80, "https": 443}
UNIX = re.compile(r"unix:(?://(?=/)|(?!//))(.+)", re.IGNORECASE)
"""Unix socket addresses in gRPC's syntax: "unix:path", "unix:/path" or "unix:///path"."""
UNIX_BASE_URL = "http://localhost"
"""Base URL of calls over a Unix socket. Its host is sent as the Host header and is not resolved."""
GRPC_SCHEMES = re.compile(
    r"(dns|unix|unix-abstract|vsock|ipv4|ipv6|xds|passthrough):.", re.IGNORECASE
)
"""Beginnings of gRPC's own targets."""
MULTI_ADDRESS_SCHEMES = re.compile(r"(dns|ipv4|ipv6):", re.IGNORECASE)
"""Schemes of gRPC's own targets that may name several servers."""


def base_url_of(address: str) -> str:
    """Returns the base URL for httpx, with "http://" if there is no scheme. Raises ValueError for
    other schemes and for a URL with a query."""
    if unix_path_of(address) is not None:
        return UNIX_BASE_URL
    parts = _split("base_url", address)
    if parts.scheme not in PORTS:
        raise ValueError(
            f"base_url: {address!r} does not start with http://, https:// or unix:, and is no "
            "HOST:PORT"
        )
    if parts.query:
        raise ValueError(f"base_url: {address!r} has a query, which the calls would not have")
    return parts.geturl()  # without a newline, which httpx rejects


def unix_path_of(address: str) -> str | None:
    """Returns the path of the Unix socket that an address names; None if it names none."""
    found = UNIX.fullmatch(address)
    return found and found[1]


def target_of(address: str) -> tuple[str, bool]:
    """Returns (gRPC target, whether the channel is encrypted). Raises ValueError for a URL with a
    path."""
    if GRPC_SCHEMES.match(address):
        return address, False
    parts = _split("target", address)
    if parts.scheme not in PORTS:
        raise ValueError(f"target: {address!r} is of no scheme that gRPC knows")
    if parts.path.strip("/") or parts.query:
        raise ValueError(f"target: {address!r} has a path, which gRPC has no use for")
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    return f"{host}:{parts.port or PORTS[parts.scheme]}", parts.scheme == "https"


def names_several(target: str) -> bool:
    """Returns whether a gRPC target may name several servers, over which calls are spread."""
    return MULTI_ADDRESS_SCHEMES.match(target) is not None


def _split(argument: str, address: str) -> SplitResult:
    """Splits an address, with "http://" if there is no scheme. Raises ValueError for one without a
    host, and for one with a user name, which httpx would send in place of the token."""
    url = address if "://" in address or address.lower() == "unix:" else f"http://{address}"
    if "@" in address:  # the address is not quoted, because the text before "@" may be a password
        raise ValueError(f"{argument} contains a user name: authenticate with a token")
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        str(parts.hostname).encode("idna")  # as the resolver does, for each call
    except ValueError as error:
        raise ValueError(f"{argument}: {address!r} is no address: {error}") from error
    if not has_host:
        raise ValueError(f"{argument}: {address!r} names no host")
    return parts
