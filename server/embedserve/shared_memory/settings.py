"""Where shared memory may be: a prefix that is one, and ports that this host alone reaches."""

from __future__ import annotations

from embedserve.config import ServeSettings, is_loopback


def check_shared_memory(settings: ServeSettings) -> None:
    """Raises ValueError for settings that make no sense with shared memory, or without."""
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
            f"{said} workers is {settings.workers}, and what one of them is told of a region no "
            "other knows: use 1"
        )
    if settings.grpc_server == "grpcio":
        raise ValueError(f"{said} grpc_server is 'grpcio', which has none: use native")
