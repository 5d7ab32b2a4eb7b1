"""Request ids: sent by the caller, or generated when a report needs an id."""

from __future__ import annotations

import re
from random import getrandbits

ExtraHeaders = list[tuple[bytes, bytes]]
"""Response headers, or gRPC trailers, beyond those of every response: of a codec and of
telemetry."""
REQUEST_ID = b"x-request-id"
ID_BYTES_MAX = 128
"""Bytes of a caller's request id; bounded, because the id is copied into responses and log lines.
"""
_USABLE = re.compile(rb"[!-~]{1,%d}" % ID_BYTES_MAX)


def usable_id(given: bytes | None) -> bytes:
    """Returns ``given`` if it is safe to copy anywhere, else b"". A safe id is 1 to ID_BYTES_MAX
    bytes of printable ASCII without spaces."""
    return given if given is not None and _USABLE.fullmatch(given) else b""


def request_id_of(given: bytes | None) -> bytes:
    """Returns the caller's id if it is usable, else a random id of 32 hex digits."""
    return usable_id(given) or b"%032x" % getrandbits(128)


def request_id_header(given: bytes | None) -> ExtraHeaders:
    """Returns the X-Request-Id response header for a request whose X-Request-Id is ``given``."""
    return [(REQUEST_ID, request_id_of(given))]
