"""Who asks, where several versions of a model share its requests: the same answers each time."""

import re
from reprlib import repr as short

from embedserve_client.errors import InvalidRequest

ROUTING_KEY = "x-routing-key"
_KEY = re.compile(r"[!-~]([ -~]{0,254}[!-~])?")


def routing_headers(routing_key: str | None) -> dict[str, str]:
    """The header, or gRPC's metadata, of a routing key; InvalidRequest for what can be none."""
    if routing_key is None:
        return {}
    if not isinstance(routing_key, str) or not _KEY.fullmatch(routing_key):
        raise InvalidRequest(
            f"routing_key: {short(routing_key)} is no text of 1 to 256 printable ASCII characters",
            field="routing_key",
        )
    return {ROUTING_KEY: routing_key}
