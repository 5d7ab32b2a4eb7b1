"""Caches what botocore reads of S3, where a process makes many clients."""

from __future__ import annotations

from functools import cache
from typing import Any


def cache_models() -> None:
    """Has the JSON that describes S3 read once in this process, for all clients.

    Every session of botocore reads it anew, which is most of the time that a client takes.
    """
    import botocore.session

    module: Any = botocore.session
    if not hasattr(module.create_loader, "cache_info"):
        module.create_loader = cache(module.create_loader)
