"""TLS and token of a router's connections to its shards, reloaded when the files change."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

from embedserve.config import MIB, ServeSettings
from embedserve.file_reloader import FileReloader
from embedserve.shard_client.shard_connection import ConnectionOptions

ALPN = ["h2"]
TOKEN_BYTES_MAX = 4096


def follow_credentials(
    settings: ServeSettings, adopt: Callable[[ConnectionOptions], None]
) -> FileReloader[ConnectionOptions] | None:
    """Calls ``adopt`` with the options of connections to shards. The reloader calls it again when a
    file has changed; None if there are no files.

    Raises:
        OSError: a file cannot be read.
        ValueError: a certificate is damaged, does not fit its key, or the token is none.
    """
    names = ("shard_ca", "shard_cert", "shard_key", "shard_token")
    paths = [path for name in names if (path := getattr(settings, name))]
    if paths:
        return FileReloader("credentials for shards", paths, partial(_read, settings), adopt)
    adopt(_read(settings))
    return None


def _read(settings: ServeSettings) -> ConnectionOptions:
    metadata = []
    if settings.shard_token:
        token = _read_token(settings.shard_token)
        metadata.append((b"authorization", b"Bearer " + token.encode()))
    context = _read_context(settings) if settings.shard_ca else None
    # The values of a batch, and the fields before them.
    response_bytes_max = settings.limits.request_output_bytes_max + MIB
    return ConnectionOptions(context, "", metadata, response_bytes_max)


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
    token = Path(path).read_bytes().decode("ascii", "replace").strip()
    is_word = token.isascii() and token.isprintable() and " " not in token
    if not token or not is_word or len(token) > TOKEN_BYTES_MAX:
        raise ValueError(f"shard_token {path} holds no token")
    return token
