"""Routing keys: they pin a caller to one version while several versions share a model's traffic."""

import re

from embedserve_client.core.short_repr import short
from embedserve_client.errors import InvalidRequest

ROUTING_KEY = "x-routing-key"
_KEY = re.compile(r"[!-~]([ -~]{0,254}[!-~])?")


def routing_headers(routing_key: str | None) -> dict[str, str]:
    """Returns the HTTP header, or gRPC metadata, of a routing key. Raises InvalidRequest for an
    invalid key."""
    if routing_key is None:
        return {}
    if not isinstance(routing_key, str) or not _KEY.fullmatch(routing_key):
        raise InvalidRequest(
            f"routing_key: {short(routing_key)} is no text of 1 to 256 printable ASCII characters",
            field="routing_key",
        )
    return {ROUTING_KEY: routing_key}
