"""`embedserve health`: whether the server on this host answers, for an image without curl.

Imports nothing heavy: it is asked again and again.
"""

from __future__ import annotations

import http.client
import ssl

TIMEOUT_S = 5.0
LIVE, READY = "/health/live", "/health/ready"
WANTS_CERTIFICATE = "CERTIFICATE_REQUIRED"


def check_health(host: str, port: int, has_tls: bool, is_ready: bool) -> None:
    """Returns where it answers that it lives, or that it ``is_ready``.

    Whose certificate it shows is not looked at: it is asked by its own host. A server that wants
    its clients' certificates and says so lives.

    Raises:
        ConnectionError: it does not answer, or otherwise; says which.
    """
    path = READY if is_ready else LIVE
    try:
        status, body = _asked(_reachable(host), port, has_tls, path)
    except ssl.SSLError as error:
        if WANTS_CERTIFICATE in (error.reason or "") and not is_ready:
            return
        raise ConnectionError(f"{host}:{port}{path}: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"{host}:{port}{path}: {error or type(error).__name__}") from error
    if status != 200:
        raise ConnectionError(f"{host}:{port}{path} answered {status}: {body}")


def _reachable(host: str) -> str:
    """Where one reaches a server that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _asked(host: str, port: int, has_tls: bool, path: str) -> tuple[int, str]:
    connection = (
        http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=_trusting())
        if has_tls
        else http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    )
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(1000).decode(errors="replace")
    finally:
        connection.close()


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
