"""Host header check for servers on a loopback address, against DNS rebinding.

Any website can make its own name resolve to 127.0.0.1. A browser then lets its pages send requests
to this server as same-origin requests. Such requests carry the site's name as their Host.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from embedserve.config import is_loopback
from embedserve.errors import PermissionDeniedError

ANY = "*"
HOST_CHARACTERS_SHOWN = 100
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+?)\.?(?::[0-9]{0,5})?")


class AllowedHosts:
    """Allowed values of the Host header: localhost, loopback addresses, and configured names."""

    def __init__(self, names: Collection[str] = ()) -> None:
        """
        Args:
            names: further host names, without ports; ANY allows all.
        """
        self._names = {name.lower().rstrip(".") for name in names}

    def check(self, headers: Collection[tuple[bytes, bytes]]) -> None:
        """Checks the ``host`` of ``headers`` (names in lower case).

        A missing or empty Host is accepted, because browsers always send one.

        Raises:
            PermissionDeniedError: the name is not allowed.
        """
        for name, value in headers:
            if name == b"host" and value and not self._has(value.decode("latin-1")):
                shown = value[:HOST_CHARACTERS_SHOWN].decode("latin-1")
                raise PermissionDeniedError(
                    f"Host is {shown!a}: without tokens a server on a loopback address accepts "
                    "localhost and its addresses; add others with --allowed-host",
                    "Host",
                )

    def _has(self, host: str) -> bool:
        if ANY in self._names:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].lower()
        return name in self._names or is_loopback(name.strip("[]"))
