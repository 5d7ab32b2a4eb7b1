"""Authentication, authorization and rate limits for callers with tokens or client certificates.

Each process has one authenticator. A request with a cached token costs one dict lookup by the bytes
of its Authorization header. Other tokens are looked up by their SHA-256 hash, so that response
times reveal nothing about valid tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, Protocol

from embedserve.access.client_address import FORWARDED, X_FORWARDED_FOR
from embedserve.access.clock import JumpTolerantClock
from embedserve.access.grants import PREFIX, Grant, hash_of, read_grants
from embedserve.errors import (
    EmbedServeError,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
)
from embedserve.file_reloader import FileReloader

KNOWN_MAX = 1024
"""Authorization headers and certificates cached per process; a full cache is cleared."""
BURST_S = 1.0
"""Seconds of its request rate that an idle caller may use up in one burst."""
UNKNOWN = "(unknown)"
"""Caller name in the metrics for unauthenticated requests; no grant can have this name."""
BEARER = b"bearer "
LIST_HEADERS = frozenset({FORWARDED, X_FORWARDED_FOR})
"""Names of list headers, whose repeated lines form one list (RFC 9110, section 5.3)."""
RETRY_S_MAX = 60
"""Upper bound, in seconds, on the retry delay sent with a rate-limit rejection."""
REFUSALS_PER_S = 200
"""Rate-limit rejections per second that each caller receives without delay. Rejections above this
rate are delayed, because a rejected caller often retries immediately."""
REFUSALS_BURST_S = 0.5
"""Seconds of REFUSALS_PER_S that a caller may use up in one burst before rejections are delayed."""
REFUSAL_WAIT_S_MAX = 1.0
"""Upper bound, in seconds, on the delay of a rate-limit rejection."""
CERTIFICATE = "embedserve.certificate"
"""Key for the client certificate, in a transport's extra info and in an ASGI scope."""
CLIENT = "embedserve.client"
"""Key of an ASGI scope for the authenticated caller; absent without authentication."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """Client certificate that the TLS handshake has verified.

    Attributes:
        names: common name of the subject, then its DNS names and URIs.
        expires_s: expiry in Unix seconds.
    """

    names: tuple[str, ...]
    expires_s: float


class AdmissionTarget(Protocol):
    """Interface of a request to admission control."""

    quota: CallerQuota | None
    start_s: float

    @property
    def certificate(self) -> Certificate | None: ...

    @property
    def can_delay_rejection(self) -> bool:
        """Whether a rejection may be delayed without holding up other requests on the same
        connection."""

    def reject_after(self, error: EmbedServeError, wait_s: float) -> None:
        """Rejects the request with ``error`` after ``wait_s`` seconds."""


class CallerQuota:
    """Named caller with its limits and counters; the same object survives reloads of the file.

    Attributes:
        grant: current grant of the caller.
        models: names of the models that the caller may use; None: all.
        active: number of embed requests in flight.
        active_max: limit on ``active``; 0 if the caller may not embed.
        free_s: time (perf_counter) when the rate has paid for all requests so far.
        interval_s: seconds of the rate that each request costs.
        answered: number of requests that ended as OK on the fast path since the last
            take_outcomes.
        outcomes: number of all other requests by outcome since the last take_outcomes.
    """

    __slots__ = (
        "_burst_s",
        "_crowded",
        "_over_rate",
        "_refusal",
        "_refused_s",
        "active",
        "active_max",
        "answered",
        "free_s",
        "grant",
        "interval_s",
        "models",
        "outcomes",
    )

    def __init__(self, grant: Grant) -> None:
        self.active = 0
        self.active_max = 0.0
        self.free_s = 0.0
        self.answered = 0
        self.outcomes: Counter[str] = Counter()
        self._refused_s = 0.0  # like free_s, for rejections at REFUSALS_PER_S
        self._refusal: Callable[[], EmbedServeError] | None = None
        self.take(grant)

    def take(self, grant: Grant) -> None:
        """Replaces the caller's grant; its counters continue."""
        self.grant = grant
        self.models = grant.models
        self._crowded = RateLimitedError(
            f"{grant.name!r} has {grant.concurrent} requests under way, which is its limit"
        )
        self._over_rate: dict[int, RateLimitedError] = {}  # by retry_after_s
        self.interval_s = 1 / grant.requests_per_second
        self._burst_s = max(0.0, BURST_S - self.interval_s)

    def refresh_expiry(self, now_s: float) -> None:
        """Checks revocation and expiry at ``now_s`` (Unix seconds), then sets ``active_max``."""
        grant, name = self.grant, self.grant.name
        if grant.revoked:
            self._refusal = lambda: UnauthenticatedError(f"the token of {name!r} was revoked")
        elif grant.expires_s <= now_s:
            when = datetime.fromtimestamp(grant.expires_s, UTC).isoformat()
            self._refusal = lambda: UnauthenticatedError(f"the token of {name!r} expired at {when}")
        else:
            self._refusal = None
        may_embed = self._refusal is None and "embed" in grant.roles
        self.active_max = grant.concurrent if may_embed else 0

    def admission_error(self, now_s: float) -> EmbedServeError | None:
        """Charges for an embed request at ``now_s`` (perf_counter), or returns why the caller may
        not start it.

        Returns:
            None if the request was charged. UnauthenticatedError if the token has expired or was
                revoked. PermissionDeniedError if the caller lacks the embed role. RateLimitedError
                if the caller is over its rate or has too many requests in flight; this object is
                shared by many rejections and never raised, so that rejecting is cheap.
        """
        if self.active < self.active_max:
            return self._charge(now_s)
        if self._refusal is not None:
            return self._refusal()
        if "embed" not in self.grant.roles:
            return PermissionDeniedError(f"{self.grant.name!r} may not embed")
        return self._crowded

    def leave(self, outcome: str) -> None:
        """Counts a request that ended with ``outcome``; it is no longer in flight."""
        self.active -= 1
        self.outcomes[outcome] += 1

    def take_outcomes(self) -> Counter[str]:
        """Returns the number of requests by outcome since the last call, and resets the counts."""
        outcomes, self.outcomes = self.outcomes, Counter()
        if self.answered:
            outcomes["OK"] += self.answered
            self.answered = 0
        return outcomes

    def rejection_wait_s(self, now_s: float) -> float:
        """Returns the delay, in seconds, of the next rate-limit rejection, and charges for it
        unless the delay is at its maximum.

        A caller that retries immediately after each rejection would cost the server more time in
        rejections than in responses. The delay leaves that time to other callers.
        """
        free_s = max(self._refused_s, now_s)
        wait_s = free_s - now_s - REFUSALS_BURST_S
        if wait_s >= REFUSAL_WAIT_S_MAX:
            return REFUSAL_WAIT_S_MAX
        self._refused_s = free_s + 1 / REFUSALS_PER_S
        return max(0.0, wait_s)

    def check_role(self, roles: frozenset[str], charge: bool) -> None:
        """Checks that the caller may make a request that needs one of ``roles``.

        Args:
            charge: whether to charge for the request by the caller's rate.

        Raises:
            UnauthenticatedError: the token has expired or was revoked.
            PermissionDeniedError: the caller has none of ``roles``.
            RateLimitedError: the caller is over its rate.
        """
        if self._refusal is not None:
            raise self._refusal()
        if not roles & self.grant.roles:
            wanted = " or ".join(sorted(roles))
            raise PermissionDeniedError(f"{self.grant.name!r} is no {wanted}")
        if charge and (error := self._charge(perf_counter())) is not None:
            raise RateLimitedError(error.message, retry_after_s=error.retry_after_s)

    def check_model(self, asked: str, default: str) -> None:
        """Raises PermissionDeniedError for a model that the caller may not use, whether or not the
        model exists.

        Args:
            asked: requested model, as name, name@version or @version; "" if the request has none.
            default: model that serves requests without a model name.
        """
        if self.models is None:
            return
        name = asked.partition("@")[0] or default.partition("@")[0]
        if name and name not in self.models:
            raise PermissionDeniedError(f"{self.grant.name!r} may not ask model {name!r}", "model")

    def _charge(self, now_s: float) -> RateLimitedError | None:
        """Charges for a request by the caller's rate, within the burst allowance. Returns the
        rejection if the caller is over its rate, else None."""
        free_s = max(self.free_s, now_s)
        wait_s = free_s - now_s - self._burst_s
        if wait_s <= 0:
            self.free_s = free_s + self.interval_s
            return None
        retry_after_s = min(RETRY_S_MAX, math.ceil(wait_s))
        error = self._over_rate.get(retry_after_s)
        if error is None:
            rate = f"{self.grant.requests_per_second:g} requests a second"
            error = RateLimitedError(
                f"{self.grant.name!r} is over its {rate}", retry_after_s=retry_after_s
            )
            self._over_rate[retry_after_s] = error
        return error


class Authenticator:
    """Authenticates callers by token or certificate, and applies their limits.

    Attributes:
        reloader: reloader of the token file, which polls it for changes.
    """

    def __init__(self, path: str, clock: JumpTolerantClock | None = None) -> None:
        """Reads the token file at ``path``. Raises OSError and ValueError, like read_grants."""
        self._clock = clock or JumpTolerantClock()
        self._clients: dict[str, CallerQuota] = {}
        self._by_hash: dict[str, CallerQuota] = {}
        self._by_certificate: dict[str, CallerQuota] = {}
        self._known: dict[bytes | Certificate | None, CallerQuota] = {}
        self._of_unknown: Counter[str] = Counter()
        self.reloader = FileReloader("tokens", [path], lambda: read_grants(path), self._adopt)

    def _adopt(self, grants: list[Grant]) -> None:
        before, self._clients = self._clients, {}
        self._by_hash, self._by_certificate, self._known = {}, {}, {}
        for grant in grants:
            client = before.get(grant.name) or CallerQuota(grant)
            client.take(grant)
            self._clients[grant.name] = client
            self._by_hash |= dict.fromkeys(grant.sha256, client)
            if grant.certificate:
                self._by_certificate[grant.certificate] = client
        self.refresh_expiry()

    def refresh_expiry(self) -> None:
        """Applies expiry to callers and cached certificates; called about every second."""
        self._clock.refresh()
        now_s = self._clock.now_s()
        for client in self._clients.values():
            client.refresh_expiry(now_s)
        for key in [one for one in self._known if isinstance(one, Certificate)]:
            if key.expires_s <= now_s:
                del self._known[key]

    def admit(self, call: AdmissionTarget, authorization: bytes | None) -> bool:
        """Authenticates and rate-limits ``call`` once its headers have arrived.

        Args:
            authorization: value of its Authorization header; b"" if the header was repeated, None
                if it was absent.

        Returns:
            True, with ``call.quota`` set. False if the call was rejected; its body is then
                discarded.
        """
        client = self._known.get(call.certificate if authorization is None else authorization)
        if client is None:
            try:
                client = self._find(authorization, call.certificate)
            except UnauthenticatedError as unknown:
                self._of_unknown[unknown.code] += 1
                call.reject_after(unknown, 0.0)
                return False
        now_s = call.start_s
        if client.free_s <= now_s and client.active < client.active_max:
            client.free_s = now_s + client.interval_s
        elif (error := client.admission_error(now_s)) is not None:
            client.outcomes[error.code] += 1
            is_often = isinstance(error, RateLimitedError) and call.can_delay_rejection
            call.reject_after(error, client.rejection_wait_s(now_s) if is_often else 0.0)
            return False
        client.active += 1
        call.quota = client
        return True

    def names(self) -> Collection[str]:
        """Returns the names of all callers, and UNKNOWN for unauthenticated requests."""
        return {UNKNOWN, *self._clients}

    def take_counts(self) -> list[tuple[str, Counter[str]]]:
        """Returns (name, requests by outcome) of each caller with requests since the last call, and
        resets the counts."""
        taken = [(name, client.take_outcomes()) for name, client in self._clients.items()]
        counts = [(name, outcomes) for name, outcomes in taken if outcomes]
        if self._of_unknown:
            counts.append((UNKNOWN, self._of_unknown))
            self._of_unknown = Counter()
        return counts

    def check(
        self,
        authorization: bytes | None,
        certificate: Certificate | None,
        roles: frozenset[str],
        *,
        pays: bool = True,
    ) -> CallerQuota:
        """Returns the caller of a request that needs one of ``roles``.

        Args:
            pays: whether to charge for the request by the caller's rate.

        Raises:
            UnauthenticatedError: the caller is unknown, or its token has expired or was revoked.
            PermissionDeniedError: the caller has none of ``roles``.
            RateLimitedError: the caller is over its rate.
        """
        client = self._find(authorization, certificate)
        client.check_role(roles, pays)
        return client

    def may_embed(self, name: str) -> bool:
        """Returns whether a caller of this name exists and may embed now."""
        client = self._clients.get(name)
        return client is not None and client.active_max > 0

    def _find(self, authorization: bytes | None, certificate: Certificate | None) -> CallerQuota:
        key: bytes | Certificate | None
        if authorization is not None:
            key, client = authorization, self._of_token(authorization)
        elif certificate is not None:
            key, client = certificate, self._of_certificate(certificate)
        else:
            raise UnauthenticatedError(
                "nothing says who asks: send Authorization: Bearer and a token"
            )
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[key] = client
        return client

    def _of_token(self, authorization: bytes) -> CallerQuota:
        if authorization[: len(BEARER)].lower() != BEARER:
            raise UnauthenticatedError("Authorization is not Bearer and one token")
        token = authorization[len(BEARER) :].strip()
        client = self._by_hash.get(hash_of(token))
        if client is not None:
            return client
        if not token.startswith(PREFIX.encode()):
            raise UnauthenticatedError("the token is wrong: it is none of embedserve's")
        raise UnauthenticatedError("the token is unknown: wrong, withdrawn or another server's")

    def _of_certificate(self, certificate: Certificate) -> CallerQuota:
        if certificate.expires_s <= self._clock.now_s():
            raise UnauthenticatedError("the client's certificate has expired")
        for name in certificate.names:
            client = self._by_certificate.get(name)
            if client is not None:
                return client
        raise UnauthenticatedError(
            "there is no token, and the client's certificate is nobody's here"
        )


def one_header(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Returns the value of a header; None if it is absent, b"" if it is repeated, because client
    and server could each pick a different value. Lines of LIST_HEADERS are joined instead."""
    return headers_by_name(headers).get(name)


def headers_by_name(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Returns the value of each header by name, built once for all requests with the same headers.

    A repeated header has the value b"". Repeated lines of LIST_HEADERS are joined with a comma.
    """
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in found:
            found[name] = value
        else:
            found[name] = b"%b, %b" % (found[name], value) if name in LIST_HEADERS else b""
    return found


def certificate_of(peercert: dict[str, Any] | None, expires_s: float) -> Certificate | None:
    """Converts ``peercert``, from ssl's getpeercert; returns None if the client sent none."""
    if not peercert:
        return None
    common = [value for part in peercert["subject"] for key, value in part if key == "commonName"]
    others = [value for kind, value in peercert.get("subjectAltName", ()) if kind in ("DNS", "URI")]
    return Certificate((*common, *others), expires_s)
