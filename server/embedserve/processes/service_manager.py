"""Reports the state of the server to the service manager that started it, such as systemd.

The protocol is sd_notify(3): a datagram to the Unix socket that NOTIFY_SOCKET names. Only the main
process reports: serve.py takes the variable out of the environment before it starts any process.
A report that cannot be sent is logged; it never ends the server.
"""

from __future__ import annotations

import logging
import socket

logger = logging.getLogger(__name__)

SEND_S_MAX = 1.0
"""Seconds that a report waits while the service manager's queue is full. Event loops wait as long,
which is less than a hang (--worker-hang-s)."""


def notify(address: str, state: str) -> None:
    """Sends ``state`` to the socket ``address``: a path, or "@" and an abstract name."""
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(SEND_S_MAX)
            sock.sendto(state.encode(), name)
    except OSError as error:
        logger.warning("%s was not reported to NOTIFY_SOCKET %r: %s", state, address, error)
