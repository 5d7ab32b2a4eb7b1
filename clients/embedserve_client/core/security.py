"""How a client shows who it is, and whom it trusts: tokens, authorities, certificates.

The same for REST and gRPC; hands on what httpx and grpc take. Reads PEM files, and nothing else.
"""

import os
import ssl
from pathlib import Path
from typing import Any

import grpc

AUTHORIZATION = "authorization"
File = str | os.PathLike[str]
Files = tuple[File, File]
"""Of a certificate and its key, in PEM."""


def headers_of(token: str | None) -> dict[str, str]:
    """What says who asks. ValueError for what is no token."""
    if token is None:
        return {}
    if not token or not token.isascii() or any(one <= " " for one in token):
        raise ValueError("token: not one word of ASCII")
    return {AUTHORIZATION: f"Bearer {token}"}


def tls_context(url: str, ca: File | None, certificate: Files | None) -> ssl.SSLContext:
    """For httpx: trusts ``ca`` alone, or the system's authorities where it is None. These take some
    20 ms to be read, so that without https:// in ``url`` it trusts nobody."""
    if ca is None and certificate is None and not url.lower().startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context = ssl.create_default_context(cafile=ca)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


def channel_credentials(ca: File | None, certificate: Files | None) -> Any:
    """For grpc; as tls_context."""
    chain, key = (None, None) if certificate is None else map(_read, certificate)
    return grpc.ssl_channel_credentials(None if ca is None else _read(ca), key, chain)


def _read(path: File) -> bytes:
    return Path(path).read_bytes()
