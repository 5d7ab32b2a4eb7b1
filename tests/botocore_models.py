"""Caches of what botocore and aiobotocore read, for processes that make many S3 clients."""

from functools import cache
from typing import Any


def cache_models() -> None:
    """Makes botocore read the JSON that describes S3, and the certificates of all authorities, once
    in this process, for all clients.

    Without the cache every client reads them again, which is most of the time to create one.
    """
    import aiobotocore.httpsession
    import botocore.session

    module: Any = botocore.session
    if hasattr(module.create_loader, "cache_info"):
        return
    module.create_loader = cache(module.create_loader)
    session: Any = aiobotocore.httpsession.AIOHTTPSession
    build = session._build_verify_context
    built = cache(lambda verify: build(session(verify)))
    session._build_verify_context = lambda self: built(self._verify)
