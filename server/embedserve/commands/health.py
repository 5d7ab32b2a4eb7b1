"""`embedserve health`: whether the server on this host answers, for an image without curl.

Imports nothing heavy: it is asked again and again.
"""

from __future__ import annotations

from embedserve.commands.running_server import CertificateRequiredError, ServerClient
from embedserve.processes.ports import bracketed

TIMEOUT_S = 5.0
BYTES_MAX = 1 << 16
LIVE, READY = "/health/live", "/health/ready"


def own_server(host: str, port: int, has_tls: bool, uds: str) -> ServerClient:
    """Where one on this host is asked that listens on ``host`` and, where there is one, on the Unix
    socket ``uds``: there, as it asks for no certificate."""
    if uds:
        return ServerClient(f"unix:{uds}")
    host = bracketed({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))
    return ServerClient(f"http{'s' if has_tls else ''}://{host}:{port}", is_own_host=True)


def check_health(client: ServerClient, is_ready: bool) -> None:
    """Returns where it answers that it lives, or that it ``is_ready``.

    A server that wants its clients' certificates, and says so, lives.

    Raises:
        ConnectionError: it does not answer, or otherwise; says which.
        ValueError: it is at no address.
    """
    try:
        client.request(READY if is_ready else LIVE, timeout_s=TIMEOUT_S, bytes_max=BYTES_MAX)
    except CertificateRequiredError as error:
        if is_ready:
            raise ConnectionError(f"{error}: ask its Unix socket (--http-uds)") from error
