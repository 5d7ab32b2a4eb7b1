"""Authentication of callers by token or client certificate. caller_quota.py has their limits.

Each process has one authenticator. A request with a cached token costs one dict lookup by the bytes
of its Authorization header. Other tokens are looked up by their SHA-256 hash, so that response
times reveal nothing about valid tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from embedserve.access.caller_quota import CallerQuota
from embedserve.access.client_address import FORWARDED, X_FORWARDED_FOR
from embedserve.access.clock import JumpTolerantClock
from embedserve.access.grants import PREFIX, Grant, hash_of, read_grants
from embedserve.errors import EmbedServeError, RateLimitedError, UnauthenticatedError
from embedserve.file_reloader import FileReloader

CACHED_MAX = 1024
"""Authorization headers and certificates cached per process; a full cache is cleared."""
UNKNOWN = "(unknown)"
"""Caller name in the metrics for unauthenticated requests; no grant can have this name."""
BEARER = b"bearer "
LIST_HEADERS = frozenset({FORWARDED, X_FORWARDED_FOR})
"""Names of list headers, whose repeated lines form one list (RFC 9110, section 5.3)."""
CERTIFICATE = "embedserve.certificate"
"""Key for the client certificate, in a transport's extra info and in an ASGI scope."""
CALLER = "embedserve.caller"
"""Key of an ASGI scope for the CallerQuota of the authenticated caller; absent without
authentication."""


@dataclass(frozen=True, eq=False)
class ClientCertificate:
    """Client certificate that the TLS handshake has verified.

    Attributes:
        names: common name of the subject, then its DNS names and URIs.
        expires_s: expiry in Unix seconds.
    """

    names: tuple[str, ...]
    expires_s: float


class AdmissionTarget(Protocol):
    """A request as the authenticator sees it.

    Attributes:
        quota: quota of its caller, which ``Authenticator.admit`` sets.
        start_s: perf_counter time when its headers had arrived, at which the rate is charged.
    """

    quota: CallerQuota | None
    start_s: float

    @property
    def certificate(self) -> ClientCertificate | None: ...

    @property
    def can_delay_rejection(self) -> bool:
        """Whether a rejection may be delayed without a cost to other callers on the connection."""

    def reject_after(self, error: EmbedServeError, wait_s: float) -> None:
        """Rejects the request with ``error`` after ``wait_s`` seconds."""


class Authenticator:
    """Authenticates callers by token or certificate, and applies their limits.

    Attributes:
        names: names of all callers, and UNKNOWN for unauthenticated requests. Each reading of the
            token file makes a new object, by which CallerMetrics notices a change.
        reloader: reloader of the token file, which polls it for changes.
    """

    def __init__(self, path: str, clock: JumpTolerantClock | None = None) -> None:
        """Reads the token file at ``path``. Raises OSError and ValueError, like read_grants."""
        self._clock = clock or JumpTolerantClock()
        self._callers: dict[str, CallerQuota] = {}
        self._unknown_outcomes: Counter[str] = Counter()
        self.reloader = FileReloader("tokens", [path], lambda: read_grants(path), self._adopt)

    def _adopt(self, grants: list[Grant]) -> None:
        before, self._callers = self._callers, {}
        self._by_hash: dict[str, CallerQuota] = {}
        self._by_certificate: dict[str, CallerQuota] = {}
        self._cached: dict[bytes | ClientCertificate | None, CallerQuota] = {}
        for grant in grants:
            caller = before.get(grant.name) or CallerQuota(grant)
            caller.set_grant(grant)
            self._callers[grant.name] = caller
            self._by_hash |= dict.fromkeys(grant.sha256, caller)
            if grant.certificate:
                self._by_certificate[grant.certificate] = caller
        self.names = frozenset({UNKNOWN, *self._callers})
        self.refresh_expiry()

    def refresh_expiry(self) -> None:
        """Applies expiry to callers and cached certificates; called every EXPIRY_CHECK_S."""
        self._clock.refresh()
        now_s = self._clock.now_s()
        for caller in self._callers.values():
            caller.refresh_expiry(now_s)
        for key in [one for one in self._cached if isinstance(one, ClientCertificate)]:
            if key.expires_s <= now_s:
                del self._cached[key]

    def admit(self, request: AdmissionTarget, authorization: bytes | None) -> bool:
        """Authenticates and rate-limits ``request`` once its headers have arrived.

        Args:
            authorization: value of its Authorization header; b"" if the header was repeated, None
                if it was absent.

        Returns:
            True, with ``request.quota`` set. False if the request was rejected; its body is then
                discarded.
        """
        caller = self._cached.get(request.certificate if authorization is None else authorization)
        if caller is None:
            try:
                caller = self._find(authorization, request.certificate)
            except UnauthenticatedError as unknown:
                self._unknown_outcomes[unknown.code] += 1
                request.reject_after(unknown, 0.0)
                return False
        now_s = request.start_s
        if caller.free_s <= now_s and caller.active < caller.active_max:
            caller.free_s = now_s + caller.interval_s
        elif (error := caller.admission_error(now_s)) is not None:
            caller.outcomes[error.code] += 1
            error.caller = caller.grant.name
            is_often = isinstance(error, RateLimitedError) and request.can_delay_rejection
            request.reject_after(error, caller.rejection_wait_s(now_s) if is_often else 0.0)
            return False
        caller.active += 1
        request.quota = caller
        return True

    def take_counts(self) -> list[tuple[str, Counter[str]]]:
        """Returns (name, requests by outcome) of each caller with requests since the last call, and
        resets the counts."""
        counts = [
            (name, caller.take_outcomes())
            for name, caller in self._callers.items()
            if caller.answered_count or caller.outcomes  # most of a large token file are idle
        ]
        if self._unknown_outcomes:
            counts.append((UNKNOWN, self._unknown_outcomes))
            self._unknown_outcomes = Counter()
        return counts

    def check(
        self,
        authorization: bytes | None,
        certificate: ClientCertificate | None,
        roles: frozenset[str],
        *,
        charge: bool = True,
    ) -> CallerQuota:
        """Returns the caller of a request that needs one of ``roles``.

        Args:
            charge: whether to charge for the request by the caller's rate.

        Raises:
            UnauthenticatedError: the caller is unknown, or its token has expired or was revoked.
            PermissionDeniedError: the caller has none of ``roles``.
            RateLimitedError: the caller is over its rate.
        """
        caller = self._find(authorization, certificate)
        caller.check_role(roles, charge)
        return caller

    def may_embed(self, name: str) -> bool:
        """Returns whether a caller of this name exists and may embed now."""
        caller = self._callers.get(name)
        return caller is not None and caller.active_max > 0

    def _find(
        self, authorization: bytes | None, certificate: ClientCertificate | None
    ) -> CallerQuota:
        key: bytes | ClientCertificate | None
        if authorization is not None:
            key, caller = authorization, self._by_token(authorization)
        elif certificate is not None:
            key, caller = certificate, self._by_certificate_name(certificate)
        else:
            raise UnauthenticatedError(
                "the request has no credentials: send Authorization: Bearer and a token"
            )
        if len(self._cached) >= CACHED_MAX:
            self._cached.clear()
        self._cached[key] = caller
        return caller

    def _by_token(self, authorization: bytes) -> CallerQuota:
        if authorization[: len(BEARER)].lower() != BEARER:
            raise UnauthenticatedError("Authorization is not Bearer and one token")
        token = authorization[len(BEARER) :].strip()
        caller = self._by_hash.get(hash_of(token))
        if caller is not None:
            return caller
        if not token.startswith(PREFIX.encode()):
            raise UnauthenticatedError("the token is wrong: embedserve makes no such tokens")
        raise UnauthenticatedError("the token is unknown: wrong, withdrawn or another server's")

    def _by_certificate_name(self, certificate: ClientCertificate) -> CallerQuota:
        if certificate.expires_s <= self._clock.now_s():
            raise UnauthenticatedError("the client's certificate has expired")
        for name in certificate.names:
            caller = self._by_certificate.get(name)
            if caller is not None:
                return caller
        raise UnauthenticatedError(
            "there is no token, and the client's certificate belongs to no caller"
        )


def headers_by_name(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Returns the value of each header by name, built once for all requests with the same headers.

    A repeated header has the value b"", because client and server could each pick another one.
    Repeated lines of LIST_HEADERS are joined with a comma.
    """
    found: dict[bytes, bytes] = {}
    lists: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name not in found:
            found[name] = value
        elif name in LIST_HEADERS:
            lists.setdefault(name, [found[name]]).append(value)
        else:
            found[name] = b""
    for name, lines in lists.items():
        found[name] = b", ".join(lines)
    return found


def certificate_of(peercert: dict[str, Any] | None, expires_s: float) -> ClientCertificate | None:
    """Converts ``peercert``, from ssl's getpeercert; returns None if the client sent none."""
    if not peercert:
        return None
    common = [value for rdn in peercert["subject"] for key, value in rdn if key == "commonName"]
    others = [value for kind, value in peercert.get("subjectAltName", ()) if kind in ("DNS", "URI")]
    return ClientCertificate((*common, *others), expires_s)
