"""Reads the URL of the broker that carries notifications. No message contains its password."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from embedserve_store.errors import StoreError

ENVIRONMENT = "EMBEDSERVE_DELTA_NOTIFY"
"""Variable that has the URL, or the path of a file with it."""
FILE_BYTES_MAX = 4096
"""Bytes of a file with a URL; a URL has some hundred."""
_KINDS = {"redis": "redis", "rediss": "redis", "nats": "nats", "tls": "nats"}
_PORTS = {"redis": 6379, "nats": 4222}
_PACKAGES = {"redis": "redis", "nats": "nats-py"}
_EXPECTED = "expected redis://HOST:PORT[/DB], rediss://…, nats://HOST:PORT or tls://… (NATS)"

Notify = str | os.PathLike[str]
"""URL of a broker, or path of a file with it."""


@dataclass(frozen=True)
class BrokerUrl:
    """Address of a broker, and how to log in. As a string it has no password."""

    scheme: str
    host: str
    port: int
    db: int = 0
    user: str = ""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}" + (f"/{self.db}" if self.db else "")

    @property
    def kind(self) -> str:
        """The broker: redis or nats."""
        return _KINDS[self.scheme]

    @property
    def is_tls(self) -> bool:
        return self.scheme in ("rediss", "tls")


def read_broker_url(notify: Notify) -> BrokerUrl:
    """Returns the address that ``notify`` is, or that is the content of the file ``notify``.

    Raises:
        StoreError: it cannot be read or used, or the broker's client is not installed.
    """
    where, text = "delta notify", os.fspath(notify).strip()
    if "://" not in text:
        where, text = f"delta notify {text}", _read(text)
    url = _parse(text, where)
    if find_spec(url.kind) is None:
        raise StoreError(
            f"{where}: {url} needs {_PACKAGES[url.kind]}: pip install 'embedserve[{url.kind}]'"
        )
    return url


def _read(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise StoreError(
            f"delta notify {path}: is no URL, and no file that can be read: {error.strerror}"
        ) from error
    if len(data) > FILE_BYTES_MAX:
        raise StoreError(f"delta notify {path}: has more than {FILE_BYTES_MAX} bytes")
    return data.decode("utf-8", "replace").strip()


def _parse(text: str, where: str) -> BrokerUrl:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise StoreError(f"{where}: is no URL; {_EXPECTED}") from None
    if parts.scheme not in _KINDS:
        raise StoreError(f"{where}: the scheme is {parts.scheme!r:.20}; {_EXPECTED}")
    if not host or port == 0:
        raise StoreError(f"{where}: names no host or port; {_EXPECTED}")
    if parts.query or parts.fragment:
        raise StoreError(f"{where}: has a query or fragment; {_EXPECTED}")
    kind = _KINDS[parts.scheme]
    return BrokerUrl(
        parts.scheme,
        host,
        port or _PORTS[kind],
        _db(parts, kind, where),
        unquote(parts.username or ""),
        unquote(parts.password or ""),
    )


def _db(parts: SplitResult, kind: str, where: str) -> int:
    """Returns the number of Redis's database, 0 by default."""
    path = parts.path.strip("/")
    if not path:
        return 0
    if kind != "redis" or not path.isascii() or not path.isdigit() or len(path) > 4:
        raise StoreError(f"{where}: the path is {parts.path!r:.20}; {_EXPECTED}")
    return int(path)
