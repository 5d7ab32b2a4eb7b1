"""A cache of the service models that botocore reads, for processes that make many S3 clients."""

from __future__ import annotations

from functools import cache
from typing import Any


def cache_models() -> None:
    """Makes botocore read the JSON that describes S3 once in this process, for all clients.

    Without the cache every botocore session reads it again, which is most of the time to create a
    client.
    """
    import botocore.session

    module: Any = botocore.session
    if not hasattr(module.create_loader, "cache_info"):
        module.create_loader = cache(module.create_loader)
