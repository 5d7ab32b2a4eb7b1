"""Who may ask: finds a request's client by its token or certificate, and keeps it to its limits.

One of a process. Once a token was seen, its request costs one look into a dict by the bytes of its
Authorization header. What is wrong with a token is found by its hash alone: how long that takes
tells nothing of tokens that are right.
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
"""Authorization headers and certificates whose clients are remembered."""
BURST_S = 1.0
"""A client that was quiet may ask at once for what its rate gives it in that time."""
UNKNOWN = "(unknown)"
"""Under which those are counted whom nobody knows. No name that a grant may have."""
BEARER = b"bearer "
LIST_HEADERS = frozenset({FORWARDED, X_FORWARDED_FOR})
"""Headers whose lines are one list (RFC 9110, section 5.3)."""
RETRY_S_MAX = 60
REFUSALS_PER_S = 200
"""That a client is told at once, for its limits; it asks again, and what is over that waits."""
REFUSALS_BURST_S = 0.5
REFUSAL_WAIT_S_MAX = 1.0
CERTIFICATE = "embedserve.certificate"
"""The name by which transports tell their client's, and scopes of ASGI."""
CLIENT = "embedserve.client"
"""The key of a scope of ASGI for its client; absent where nobody is asked who they are."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """A client's, which TLS has found right.

    Attributes:
        names: its common name, then its DNS names and URIs.
        expires_s: Unix time.
    """

    names: tuple[str, ...]
    expires_s: float


class AdmissionTarget(Protocol):
    """What access asks of a request."""

    quota: CallerQuota | None
    start_s: float

    @property
    def certificate(self) -> Certificate | None: ...

    @property
    def can_delay_rejection(self) -> bool:
        """Whether its refusal may wait, and keep nobody but its client waiting."""

    def reject_after(self, error: EmbedServeError, wait_s: float) -> None:
        """Takes why it is refused, which it is to be told in so many seconds."""


class CallerQuota:
    """Who asks, by name; goes on while the file is read again.

    Attributes:
        models: that it may ask; None: all.
        active: embed requests under way.
        active_max: of them; 0 where it may ask none.
        free_s: when all that it asked so far is paid at its rate (perf_counter).
        interval_s: that each request pays.
        answered: requests that ended so at once, since they were counted.
        outcomes: how many of the others ended how, since then.
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
        self._refused_s = 0.0  # as free_s, of its refusals at their rate
        self._refusal: Callable[[], EmbedServeError] | None = None
        self.take(grant)

    def take(self, grant: Grant) -> None:
        """What it may from now on."""
        self.grant = grant
        self.models = grant.models
        self._crowded = RateLimitedError(
            f"{grant.name!r} has {grant.concurrent} requests under way, which is its limit"
        )
        self._over_rate: dict[int, RateLimitedError] = {}  # by when to come again
        self.interval_s = 1 / grant.requests_per_second
        self._burst_s = max(0.0, BURST_S - self.interval_s)

    def refresh_expiry(self, now_s: float) -> None:
        """Whether it may ask now (Unix seconds), which active_max then says."""
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
        """Pays ahead for an embed request (``now_s`` by perf_counter); else says why it may not
        begin one.

        Returns:
            UnauthenticatedError (expired or revoked), PermissionDeniedError (its role is another),
            or RateLimitedError (over its rate, or too many are under way), which is the same for
            many and never raised: refusing them costs little.
        """
        if self.active < self.active_max:
            return self._charge(now_s)
        if self._refusal is not None:
            return self._refusal()
        if "embed" not in self.grant.roles:
            return PermissionDeniedError(f"{self.grant.name!r} may not embed")
        return self._crowded

    def leave(self, outcome: str) -> None:
        """Ends one as ``outcome``."""
        self.active -= 1
        self.outcomes[outcome] += 1

    def take_outcomes(self) -> Counter[str]:
        """Requests by outcome, since the last time."""
        outcomes, self.outcomes = self.outcomes, Counter()
        if self.answered:
            outcomes["OK"] += self.answered
            self.answered = 0
        return outcomes

    def rejection_wait_s(self, now_s: float) -> float:
        """How long another refusal for its limits is to wait.

        Who asks again as soon as it was refused takes more of the server's time by what is refused
        than by what is answered; so it waits, and others have that time.
        """
        free_s = max(self._refused_s, now_s)
        wait_s = free_s - now_s - REFUSALS_BURST_S
        if wait_s >= REFUSAL_WAIT_S_MAX:
            return REFUSAL_WAIT_S_MAX
        self._refused_s = free_s + 1 / REFUSALS_PER_S
        return max(0.0, wait_s)

    def check_role(self, roles: frozenset[str], charge: bool) -> None:
        """Raises what why_not says, where it has none of ``roles``; else ``pays`` for a request."""
        if self._refusal is not None:
            raise self._refusal()
        if not roles & self.grant.roles:
            wanted = " or ".join(sorted(roles))
            raise PermissionDeniedError(f"{self.grant.name!r} is no {wanted}")
        if charge and (error := self._charge(perf_counter())) is not None:
            raise RateLimitedError(error.message, retry_after_s=error.retry_after_s)

    def check_model(self, asked: str, default: str) -> None:
        """Raises PermissionDeniedError for a model that it may not ask, be there one or not.

        Args:
            asked: the model's name, with a version or without; both may be left out.
            default: what answers where it has none.
        """
        if self.models is None:
            return
        name = asked.partition("@")[0] or default.partition("@")[0]
        if name and name not in self.models:
            raise PermissionDeniedError(f"{self.grant.name!r} may not ask model {name!r}", "model")

    def _charge(self, now_s: float) -> RateLimitedError | None:
        """Pays for a request by its rate, where those before may not be paid yet; else says why
        not."""
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
    """The clients of a server.

    Attributes:
        followed: has the file read again when it changes.
    """

    def __init__(self, path: str, clock: JumpTolerantClock | None = None) -> None:
        """Raises OSError and ValueError, as read_grants."""
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
        """Sees what has expired; called about every second."""
        self._clock.refresh()
        now_s = self._clock.now_s()
        for client in self._clients.values():
            client.refresh_expiry(now_s)
        for key in [one for one in self._known if isinstance(one, Certificate)]:
            if key.expires_s <= now_s:
                del self._known[key]

    def admit(self, call: AdmissionTarget, authorization: bytes | None) -> bool:
        """Whether ``call`` may be asked, which is to be known once its head has come. It then has
        its client; one that may not is denied, and its body is nobody's.

        Args:
            authorization: its header; b"" where there were several, None where there was none.
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
        """Of all clients, and of those whom nobody knows."""
        return {UNKNOWN, *self._clients}

    def take_counts(self) -> list[tuple[str, Counter[str]]]:
        """(name, requests by outcome) of those that asked since the last time."""
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
        """Returns the client of a request, which ``pays`` for it by its rate. Raises what admit
        says, where it has none of ``roles``."""
        client = self._find(authorization, certificate)
        client.check_role(roles, pays)
        return client

    def may_embed(self, name: str) -> bool:
        """Whether there is such a client, and it may ask for vectors now."""
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
    """The value of a header; b"" where there are several, of which each end could read another."""
    return headers_by_name(headers).get(name)


def headers_by_name(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """As one_header, of each name: made once for the requests that have the same headers. Several
    lines of a header that is a list are one."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in found:
            found[name] = value
        else:
            found[name] = b"%b, %b" % (found[name], value) if name in LIST_HEADERS else b""
    return found


def certificate_of(peercert: dict[str, Any] | None, expires_s: float) -> Certificate | None:
    """Of what ssl tells of a client's certificate; None: it showed none."""
    if not peercert:
        return None
    common = [value for part in peercert["subject"] for key, value in part if key == "commonName"]
    others = [value for kind, value in peercert.get("subjectAltName", ()) if kind in ("DNS", "URI")]
    return Certificate((*common, *others), expires_s)
