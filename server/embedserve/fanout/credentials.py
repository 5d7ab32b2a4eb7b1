"""TLS and token of a router's connections to its shards, reloaded when the files change."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from embedserve.config import MIB, ServeSettings
from embedserve.file_reloader import FileReloader
from embedserve.shard_client.shard_connection import ConnectionOptions

ALPN = ["h2"]
TOKEN_BYTES_MAX = 4096


class ShardCredentials:
    """Options of new connections to shards. Connections that are open keep theirs: whoever has some
    replaces them when the options change.

    Attributes:
        options: present options.
        reloader: reloader of the files; None if there are none.
    """

    options: ConnectionOptions

    def __init__(self, settings: ServeSettings, on_change: Callable[[], None]) -> None:
        """Reads the files.

        Args:
            on_change: called after the files were read, also for the first time.

        Raises:
            OSError: a file cannot be read.
            ValueError: a certificate is damaged, does not fit its key, or the token is none.
        """
        self._settings = settings
        self._on_change = on_change
        # The values of a batch, and the fields before them.
        self._response_bytes_max = settings.limits.request_output_bytes_max + MIB
        self.options = ConnectionOptions(response_bytes_max=self._response_bytes_max)
        self.reloader: FileReloader[ConnectionOptions] | None = None
        names = ("shard_ca", "shard_cert", "shard_key", "shard_token")
        paths = [path for name in names if (path := getattr(settings, name))]
        if paths:
            self.reloader = FileReloader("credentials for shards", paths, self._read, self._adopt)

    def for_host(self, host: str) -> ConnectionOptions:
        """Returns the options of connections to ``host``, the name in its certificate; "" for the
        address itself."""
        return replace(self.options, server_hostname=host) if host else self.options

    def _adopt(self, options: ConnectionOptions) -> None:
        self.options = options
        self._on_change()

    def _read(self) -> ConnectionOptions:
        settings = self._settings
        metadata = []
        if settings.shard_token:
            token = _read_token(settings.shard_token)
            metadata.append((b"authorization", b"Bearer " + token.encode()))
        context = _read_context(settings) if settings.shard_ca else None
        return ConnectionOptions(context, "", metadata, self._response_bytes_max)


def _read_context(settings: ServeSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(ALPN)
    with open(settings.shard_ca, "rb"):  # errors of open name the path, unlike those of OpenSSL
        pass
    try:
        context.load_verify_locations(settings.shard_ca)
    except ssl.SSLError as error:
        raise ValueError(f"shard_ca {settings.shard_ca} holds no certificates: {error}") from error
    if settings.shard_cert:
        for path in (settings.shard_cert, settings.shard_key):
            with open(path, "rb"):
                pass
        try:
            # Without a password callback OpenSSL prompts on the terminal for an encrypted key.
            context.load_cert_chain(settings.shard_cert, settings.shard_key, password=lambda: "")
        except ssl.SSLError as error:
            raise ValueError(
                f"shard_cert {settings.shard_cert} and shard_key {settings.shard_key} are no "
                f"pair: {error}"
            ) from error
    return context


def _read_token(path: str) -> str:
    token = Path(path).read_text("ascii").strip()
    if not token or len(token) > TOKEN_BYTES_MAX or not token.isprintable() or " " in token:
        raise ValueError(f"shard_token {path} holds no token")
    return token
