"""Raises the limit on file descriptors for the connections, or bounds their number by it.

The kernel enforces the soft limit, often 1,024. Connections that use up all descriptors keep the
process from opening any file, such as the tokens or a new version.
"""

from __future__ import annotations

import contextlib
import logging
import resource
from dataclasses import replace

from embedserve.config import ServeSettings

logger = logging.getLogger(__name__)

RESERVED = 2048
"""Descriptors of a process beyond `connections_max`: the files of its versions, connections to the
store and to shards, and those to the management port."""


def reserve_descriptors(settings: ServeSettings) -> ServeSettings:
    """Raises the soft limit of this process, which its children inherit, as far as connections and
    files need it. Returns the settings; with fewer connections, and a warning, if the limit does
    not suffice."""
    limits = settings.limits
    needed = limits.connections_max + RESERVED
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < needed and limit < hard:
        # A sandbox may forbid it: EPERM is a ValueError here.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
            limit = min(needed, hard)
    if limit >= needed:
        return settings
    connections = min(limits.connections_max, max(limit - RESERVED, limit // 2))
    if connections == limits.connections_max:
        return settings
    logger.warning(
        "connections_max is %d, but a process may have %d file descriptors: it accepts %d "
        "connections and keeps the others for files; raise the limit (`ulimit -Hn`, LimitNOFILE) "
        "or lower --connections-max",
        limits.connections_max,
        limit,
        connections,
    )
    return replace(settings, limits=replace(limits, connections_max=connections))
