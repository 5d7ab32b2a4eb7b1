"""Token file: one JSON object per line, with hashes of tokens and never a token itself.

Errors name the line and the key but no value, because an editor of the file may have put a token
where its hash belongs.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PREFIX = "es_"
TOKEN_BYTES = 32
"""Random bytes of a token. 32 bytes cannot be guessed, so the hash needs no salt and no slow hash
function."""
GRANTS_MAX = 10_000
"""Grants in a token file."""
TOKENS_MAX = 2
"""Tokens per grant: the current token and the next, for rotation."""
ROLES = ("embed", "admin")
EMBEDDERS = frozenset({"embed"})
"""Roles that may look up vectors."""
CALLERS = frozenset(ROLES)
"""Roles that may request what describes the models: all roles."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/:-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
NEVER = float("inf")
"""Infinity: the token never expires, or the rate or concurrency has no limit."""


@dataclass(frozen=True)
class Grant:
    """Permissions and limits of a named caller.

    Attributes:
        name: name of the caller.
        sha256: SHA-256 hashes of its tokens, in hex; empty if only a certificate identifies it.
        certificate: common name, DNS name or URI of the client certificate that identifies it; ""
            for none.
        models: names of the models that it may use; None: all.
        roles: roles of the caller. embed: vector lookups, and what describes the models. admin:
            what describes the models, metrics, pages and server administration.
        expires_s: expiry in Unix seconds; infinite: never.
        requests_per_second: long-term request rate per process; infinite: no limit.
        concurrent: limit on embed requests in flight per process; infinite: no limit.
        revoked: whether its requests are rejected with the message that the token was revoked.
    """

    name: str
    sha256: tuple[str, ...] = ()
    certificate: str = ""
    models: frozenset[str] | None = None
    roles: frozenset[str] = frozenset({"embed"})
    expires_s: float = NEVER
    requests_per_second: float = NEVER
    concurrent: float = NEVER
    revoked: bool = False


def new_token() -> tuple[str, str]:
    """Returns (token, its hash) for a new random token."""
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    return token, hash_of(token.encode())


def hash_of(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


def read_grants(path: str) -> list[Grant]:
    """Returns the grants of a token file. Empty lines and lines that begin with # are skipped.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not text, has no grant or over GRANTS_MAX, or has an invalid line,
            which the message names.
    """
    grants: list[Grant] = []
    try:
        text = Path(path).read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error.reason}") from error
    taken: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            grant = grant_of(line)
            for one in _identities(grant):
                before = taken.setdefault(one, number)
                _check(before == number, f"the same name or token as line {before}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        grants.append(grant)
        if len(grants) > GRANTS_MAX:
            raise ValueError(f"{path} has over {GRANTS_MAX} lines")
    if not grants:  # as in a file that was truncated to be written anew
        raise ValueError(f"{path} has no line of a caller")
    return grants


def _identities(grant: Grant) -> list[str]:
    """Returns all by which ``grant`` is found, which no other line of the file may have."""
    certificates = [f"certificate {grant.certificate}"] if grant.certificate else []
    return [f"name {grant.name}", *grant.sha256, *certificates]


def grant_of(line: str) -> Grant:
    """Parses one line of a token file. Raises ValueError if it is invalid."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON at column {error.colno}: {error.msg}") from None
    except RecursionError:  # a thousand brackets
        raise ValueError("no JSON object") from None
    _check(isinstance(found, dict), "no JSON object")
    unknown = set(found) - KEYS.keys()
    _check(not unknown, f"a key is none of {', '.join(KEYS)}")
    _check("name" in found, "name is missing")
    grant = Grant(**dict(KEYS[key](key, value) for key, value in found.items()))
    _check(bool(grant.sha256 or grant.certificate), "neither sha256 nor certificate is given")
    return grant


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise ValueError(message)


def _name(key: str, value: Any) -> tuple[str, Any]:
    is_name = isinstance(value, str) and _NAME.fullmatch(value)
    _check(bool(is_name), f"{key} is not up to 128 letters, digits and ._@/:-")
    return key, value


def _sha256(key: str, value: Any) -> tuple[str, Any]:
    hashes = value if isinstance(value, list) else [value]
    is_few = 1 <= len(hashes) <= TOKENS_MAX
    _check(is_few, f"{key} is not one hash, or a list of up to {TOKENS_MAX}")
    for one in hashes:
        is_hash = isinstance(one, str) and _SHA256.fullmatch(one)
        _check(bool(is_hash), f"{key} is not 64 hexadecimal digits in lower case")
    return key, tuple(hashes)


def _models(key: str, value: Any) -> tuple[str, Any]:
    is_list = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    _check(bool(is_list), f"{key} is not a list of names; left out, it is all models")
    return key, frozenset(value)


def _roles(key: str, value: Any) -> tuple[str, Any]:
    is_right = isinstance(value, list) and value and all(one in ROLES for one in value)
    _check(bool(is_right), f"{key} is not a list of {' and '.join(ROLES)}")
    return key, frozenset(value)


def _expires(key: str, value: Any) -> tuple[str, Any]:
    try:
        when = datetime.fromisoformat(value)
        in_utc = when.replace(tzinfo=when.tzinfo or UTC).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{key} is not a time like 2027-01-31 or 2027-01-31T12:00:00Z") from None
    return "expires_s", in_utc.timestamp()


def _rate(key: str, value: Any) -> tuple[str, Any]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _check(is_number and 0 < value <= 1e9, f"{key} is not a number above 0")
    return key, float(value)


def _count(key: str, value: Any) -> tuple[str, Any]:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    _check(is_count and 0 < value <= 1e9, f"{key} is not a whole number above 0")
    return key, value


def _flag(key: str, value: Any) -> tuple[str, Any]:
    _check(isinstance(value, bool), f"{key} is neither true nor false")
    return key, value


KEYS = {
    "name": _name,
    "sha256": _sha256,
    "certificate": _name,
    "models": _models,
    "roles": _roles,
    "expires": _expires,
    "requests_per_second": _rate,
    "concurrent": _count,
    "revoked": _flag,
}
