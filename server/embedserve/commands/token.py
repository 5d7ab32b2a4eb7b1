"""`embedserve token`: creates a token, and the line that authorizes it in a server's token file."""

from __future__ import annotations

import json
import re
import sys
import time
from datetime import UTC, datetime, timedelta

from embedserve.access.grants import grant_of, new_token


def make_token(
    name: str,
    models: str | None,
    roles: str,
    expires: str | None,
    requests_per_second: float | None,
    concurrent: int | None,
) -> None:
    """Prints the line to stdout and the token to stderr, so that `>> FILE` stores only the line.

    Raises:
        ValueError: an option is invalid, the token would have expired, or stderr is closed.
    """
    if sys.stderr is None:  # print would write the token to stdout, which may be the token file
        raise ValueError("stderr is closed, and the token is printed there")
    token, sha256 = new_token()
    found = {
        "name": name,
        "sha256": sha256,
        "models": None if models is None else _listed(models),
        "roles": _listed(roles),
        "expires": None if expires is None else _time(expires),
        "requests_per_second": requests_per_second,
        "concurrent": concurrent,
    }
    line = json.dumps({key: value for key, value in found.items() if value is not None})
    if grant_of(line).expires_s <= time.time():
        raise ValueError(f"expires is {expires!r}, expected a time in the future")
    print(line)
    print(token, file=sys.stderr)


def _listed(names: str) -> list[str]:
    return [one.strip() for one in names.split(",") if one.strip()]


def _time(expires: str) -> str:
    days = re.fullmatch(r"(\d{1,6})d", expires)
    if days is not None:
        return (datetime.now(UTC) + timedelta(days=int(days[1]))).isoformat(timespec="seconds")
    try:
        datetime.fromisoformat(expires)
    except ValueError:
        raise ValueError(
            f"expires is {expires!r}, expected days such as 90d, or a time such as 2027-01-31"
        ) from None
    return expires
