"""TLS certificate and key of the server, and the CA of client certificates.

A pair is tested by an in-memory handshake before it is used. The test fails if the key does not
match, the certificate has expired, or a file is incomplete.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from embedserve.config import ServeSettings
from embedserve.file_reloader import FileReloader, named_in_errors

ALPN = ["h2", "http/1.1"]
CIPHERS_OF_TLS_1_2 = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Cipher suites of TLS 1.2 that HTTP/2 allows (RFC 9113, appendix A). TLS 1.3 has no others."""
CRL_BEGINNING = b"-----BEGIN X509 CRL-----"
TRIAL_STEPS_MAX = 8
"""Steps until a trial handshake counts as failed; a successful handshake takes three."""


@dataclass(frozen=True)
class TlsFiles:
    """Paths of the TLS files, in PEM format.

    Attributes:
        client_ca: path of the CA certificates for client certificates, with revocation lists if
            any; "": clients need no certificate.
    """

    certificate: str
    key: str
    client_ca: str = ""

    @property
    def paths(self) -> list[str]:
        return [path for path in (self.certificate, self.key, self.client_ca) if path]


class Certificates:
    """Current TLS context, reloaded when the files change.

    Attributes:
        context: context for new handshakes.
        expires_s: Unix time when the current server certificate expires.
        reloader: reloader that builds a new context when the files change.
    """

    context: ssl.SSLContext
    expires_s: float

    def __init__(self, files: TlsFiles) -> None:
        """Loads the files. Raises OSError and ValueError, like read_context."""
        self.reloader = FileReloader(
            f"TLS ({files.certificate})", files.paths, lambda: read_context(files), self._adopt
        )

    def _adopt(self, read: tuple[ssl.SSLContext, float]) -> None:
        self.context, self.expires_s = read


def tls_files(settings: ServeSettings) -> TlsFiles | None:
    """Returns the TLS files of ``settings``; None if TLS is off."""
    if not settings.tls_cert:
        return None
    return TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def read_context(files: TlsFiles) -> tuple[ssl.SSLContext, float]:
    """Builds the TLS context from ``files`` and tests it.

    Returns:
        context for new handshakes, and Unix time when the server certificate expires.

    Raises:
        OSError: a file cannot be read; the message names it and its setting.
        ValueError: clients cannot accept the pair; the message says why and reveals nothing of the
            key.
    """
    for name, path in zip(("tls_cert", "tls_key", "tls_client_ca"), files.paths, strict=False):
        with named_in_errors(name), open(path, "rb"):  # OpenSSL's errors do not name the path
            pass
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_ciphers(CIPHERS_OF_TLS_1_2)
    context.set_alpn_protocols(ALPN)
    try:
        # Without a password callback OpenSSL prompts on the terminal for an encrypted key.
        context.load_cert_chain(files.certificate, files.key, password=lambda: "")
    except ssl.SSLError as error:
        raise ValueError(
            f"tls_cert {files.certificate} and tls_key {files.key} are no pair: {_reason(error)}"
        ) from error
    if files.client_ca:
        _verify_clients(context, files.client_ca)
    return context, _test_pair(context, files.certificate)


def _verify_clients(context: ssl.SSLContext, path: str) -> None:
    context.verify_mode = ssl.CERT_REQUIRED
    # A session resumed by a ticket of TLS 1.3 verifies no certificate, and gets the next ticket.
    context.num_tickets = 0
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"tls_client_ca {path} holds no certificates: {_reason(error)}") from error
    if CRL_BEGINNING in Path(path).read_bytes():
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _test_pair(context: ssl.SSLContext, certificate: str) -> float:
    """Tests the pair by an in-memory handshake. Returns Unix time when the certificate expires.

    Raises:
        ValueError: no client could accept the certificate, even one that trusts it.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        trusting.load_verify_locations(certificate)
        client = trusting.wrap_bio(to_client, to_server)
        server = context.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(TRIAL_STEPS_MAX):
            if advance(client) and (shown := client.getpeercert()):
                return ssl.cert_time_to_seconds(str(shown["notAfter"]))
            advance(server)
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"tls_cert {certificate}: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise ValueError(f"tls_cert {certificate}: {_reason(error)}") from error
    raise ValueError(f"tls_cert {certificate}: no handshake succeeds with it")


def advance(one: ssl.SSLObject) -> bool:
    """Takes a step of a handshake. Returns whether it is complete; False if it has to read more."""
    try:
        one.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
