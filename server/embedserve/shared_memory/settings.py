"""Validation of the shared-memory settings: a valid prefix, and loopback ports only."""

from __future__ import annotations

from embedserve.config import ServeSettings, is_loopback


def check_shared_memory(settings: ServeSettings) -> None:
    """Raises ValueError if the prefix is invalid, or if shared memory is enabled with settings that
    it does not support: ports beyond loopback, several workers or the grpcio server."""
    prefix = settings.shared_memory
    if not prefix:
        return
    if not prefix.startswith("/") or "/" in prefix[1:] or not prefix.isprintable():
        raise ValueError(
            f"shared_memory is {prefix!r}, expected a slash and what names begin with, such as "
            "/ranker-, or / for any"
        )
    said = f"shared_memory is {prefix!r}, but"
    names = ["host"] if settings.management_port < 0 else ["host", "management_host"]
    for name in names:
        host = getattr(settings, name)
        if not is_loopback(host):
            raise ValueError(
                f"{said} {name} is {host!r}, which others than this host reach: use 127.0.0.1"
            )
    if settings.workers > 1:
        raise ValueError(
            f"{said} workers is {settings.workers}, and a region is registered with one worker "
            "only: use 1"
        )
    if settings.grpc_server == "grpcio":
        raise ValueError(f"{said} grpc_server is 'grpcio', which has none: use native")
