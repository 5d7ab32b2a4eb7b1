"""The id of a request: its caller's, or one that is made once somebody has to name the request."""

from __future__ import annotations

import re
from random import getrandbits

HeaderList = list[tuple[bytes, bytes]]
"""What an answer's headers, or a gRPC answer's trailers, tell of its request."""
REQUEST_ID = b"x-request-id"
ID_BYTES_MAX = 128
"""Of a caller's: it is copied into answers and lines of the log."""
_USABLE = re.compile(rb"[!-~]{1,%d}" % ID_BYTES_MAX)


def usable_id(given: bytes | None) -> bytes:
    """``given``, where it is an id that can be copied anywhere: printable ASCII without spaces, of
    up to ID_BYTES_MAX; else b""."""
    return given if given is not None and _USABLE.fullmatch(given) else b""


def request_id_of(given: bytes | None) -> bytes:
    """The caller's id if it is usable, else one of 32 hex digits that is made."""
    return usable_id(given) or b"%032x" % getrandbits(128)


def request_id_header(given: bytes | None) -> HeaderList:
    """The id of a request whose X-Request-Id is ``given``."""
    return [(REQUEST_ID, request_id_of(given))]
