"""Connection of this process to a Ray cluster. ray is imported here, not at the top."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from embedserve.shard_client.discovery import parse_address

PYTHON = (sys.executable, "-W", "ignore", "-m", "embedserve.processes.ray_backend")
"""Command of the processes that connect to Ray."""
INSTALL = "pip install 'embedserve[ray]'"
NAMESPACE = "embedserve"
"""Ray's namespace of the names of all shards."""
AUTO = "auto"
"""Address of the Ray cluster that this host is a node of."""
CONNECT_S_MAX = 5.0
"""Seconds to reach the address. ray alone tries for minutes, in which it logs nothing useful."""
SHARDS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_installed() -> None:
    """Raises ValueError if ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f"ray is not installed: {INSTALL}")


def check_shards_name(name: str) -> None:
    """Raises ValueError if shards in a Ray cluster cannot have the name."""
    if not SHARDS_NAME.fullmatch(name):
        raise ValueError(
            f"the name of shards in Ray is {name!r}: expected at most 63 letters, digits, '.', "
            "'_' and '-', the first a letter or digit"
        )


def check_address(address: str) -> None:
    """Raises ValueError if ``address`` is neither HOST:PORT nor ``auto``, and OSError if HOST:PORT
    cannot be reached."""
    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS") or AUTO
    if address == AUTO:
        return
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise ValueError(
            f"the address of Ray is {address!r}: expected HOST:PORT of its head node, or {AUTO}"
        ) from error
    try:
        socket.create_connection((host, port), CONNECT_S_MAX).close()
    except OSError as error:
        raise OSError(f"no Ray cluster at {address}: {error}") from error


def has_control_plane() -> bool:
    """Returns whether the control plane (GCS) of the connected Ray cluster accepts connections."""
    import ray

    try:
        check_address(ray.get_runtime_context().gcs_address)
    except OSError:
        return False
    return True


@contextmanager
def connected(address: str, *, shows_logs: bool) -> Iterator[None]:
    """Connects to Ray for its block. What this process has created in Ray ends with it.

    Args:
        address: HOST:PORT of the head node, or ``auto``.
        shows_logs: whether output of the actors of this process is written to stderr.

    Raises:
        OSError: there is no such cluster, or this host is no node of it.
        ValueError: the address is malformed.
    """
    check_installed()
    check_address(address)
    import ray

    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=shows_logs,
            logging_level="warning",
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise OSError(f"cannot connect to Ray at {address}: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()
