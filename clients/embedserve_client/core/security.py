"""Credentials of a client and the authorities that it trusts: tokens, TLS certificates.

The same for REST and gRPC. Returns objects for httpx and grpc. Reads PEM files and nothing else.
"""

import os
import ssl
from pathlib import Path
from typing import Any

import grpc

AUTHORIZATION = "authorization"
File = str | os.PathLike[str]
Files = tuple[File, File]
"""(certificate, key): paths of PEM files."""


def headers_of(token: str | None) -> dict[str, str]:
    """Returns the authorization header of a token. Raises ValueError for an invalid token."""
    if token is None:
        return {}
    if not token or not token.isascii() or any(one <= " " for one in token):
        raise ValueError("token: not one word of ASCII")
    return {AUTHORIZATION: f"Bearer {token}"}


def tls_context(url: str, ca: File | None, certificate: Files | None) -> ssl.SSLContext:
    """Returns the TLS context for httpx. It trusts ``ca`` alone, or the system's authorities if
    ``ca`` is None.

    Loading the system's authorities takes about 20 ms. Without https:// in ``url`` and without
    certificates they are not loaded, and the context trusts no server.
    """
    if ca is None and certificate is None and not url.lower().startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for file in filter(None, (ca, *(certificate or ()))):
        _read(file)  # its OSError names the file, that of ssl does not
    context = ssl.create_default_context(cafile=ca)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


def channel_credentials(ca: File | None, certificate: Files | None) -> Any:
    """Returns the channel credentials for grpc; arguments and errors as for `tls_context`.

    grpc would raise no error for invalid files. All calls would fail without the reason, and the
    system's authorities would be trusted in place of an empty ``ca``.
    """
    tls_context("", ca, certificate)
    chain, key = (None, None) if certificate is None else map(_read, certificate)
    return grpc.ssl_channel_credentials(None if ca is None else _read(ca), key, chain)


def _read(path: File) -> bytes:
    return Path(path).read_bytes()
