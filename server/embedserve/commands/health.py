"""`embedserve health`: checks whether the server on this host responds, for images without curl.

Nothing heavy is imported, because a healthcheck runs repeatedly.
"""

from __future__ import annotations

from embedserve.commands.running_server import CertificateRequiredError, ServerClient
from embedserve.config import bracketed

TIMEOUT_S = 5.0
BYTES_MAX = 1 << 16
LIVE, READY = "/health/live", "/health/ready"


def own_server(host: str, port: int, has_tls: bool, uds: str) -> ServerClient:
    """Returns a client of the server on this host that listens on ``host``. The Unix socket ``uds``
    is preferred if given, because it requires no certificate."""
    if uds:
        return ServerClient(f"unix:{uds}")
    host = bracketed({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))
    return ServerClient(f"http{'s' if has_tls else ''}://{host}:{port}", is_own_host=True)


def check_health(client: ServerClient, must_be_ready: bool) -> None:
    """Returns if the server is live, or ready if ``must_be_ready``.

    A server that rejects the connection for want of a client certificate counts as live.

    Raises:
        ConnectionError: the server does not respond, or responds with an error; the message says
            which.
        ValueError: the address is invalid.
    """
    try:
        client.request(READY if must_be_ready else LIVE, timeout_s=TIMEOUT_S, bytes_max=BYTES_MAX)
    except CertificateRequiredError as error:
        if must_be_ready:
            raise ConnectionError(f"{error}: use its Unix socket (--http-uds)") from error
