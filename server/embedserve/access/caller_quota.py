"""Limits and counters of one named caller: its rate, its concurrent requests, its models.

The rate is a token bucket, kept as the one time at which it is full again (``free_s``). A request
within the limits costs a few comparisons. Rejections are charged, too: a caller that retries
immediately after each rejection waits longer for the next one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter

from embedserve.access.grants import Grant
from embedserve.errors import (
    EmbedServeError,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
    shortened,
)

BURST_S = 1.0
"""Seconds of its request rate that an idle caller may use up in one burst."""
ROUNDING_S = 1e-6
"""Seconds by which a rate may be exceeded. Sums of intervals are rounded: without it one request of
a burst at one moment would be rejected at some times."""
RETRY_S_MAX = 60
"""Upper bound, in seconds, on the retry delay sent with a rate-limit rejection."""
REJECTIONS_PER_S = 200
"""Rate-limit rejections per second that each caller receives without delay. Rejections above this
rate are delayed, because a rejected caller often retries immediately."""
REJECTIONS_BURST_S = 0.5
"""Seconds of REJECTIONS_PER_S that a caller may use up in a burst before rejections are delayed."""
REJECTION_WAIT_S_MAX = 1.0
"""Upper bound, in seconds, on the delay of a rate-limit rejection."""


class CallerQuota:
    """Named caller with its limits and counters; the same object survives reloads of the file.

    Attributes:
        grant: current grant of the caller.
        models: names of the models that the caller may use; None: all.
        active: number of embed requests in flight.
        active_max: limit on ``active``; 0 if the caller may not embed.
        free_s: time (perf_counter) when the rate has paid for all requests so far: each adds
            ``interval_s``, and it may be up to a burst ahead.
        interval_s: seconds between two requests at the caller's rate.
        answered_count: number of answered requests that telemetry did not observe, since the last
            take_outcomes. `RequestContext.write` adds to it without a lookup of the outcome.
        outcomes: number of all other requests by outcome, since the last take_outcomes; "OK" are
            those that telemetry observed.
    """

    __slots__ = (
        "_burst_s",
        "_concurrency_error",
        "_over_rate",
        "_rejected_s",
        "_rejection",
        "active",
        "active_max",
        "answered_count",
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
        self.answered_count = 0
        self.outcomes: Counter[str] = Counter()
        self._rejected_s = 0.0  # like free_s, for rejections at REJECTIONS_PER_S
        self._rejection: Callable[[], EmbedServeError] | None = None
        self.set_grant(grant)

    def set_grant(self, grant: Grant) -> None:
        """Replaces the caller's grant; its counters continue. Charges at the previous rate delay
        the next request by at most one interval of the new rate."""
        self.grant = grant
        self.models = grant.models
        self._concurrency_error = RateLimitedError(
            f"{grant.name!r} has {grant.concurrent} requests in flight, which is its limit"
        )
        self._over_rate: dict[int, RateLimitedError] = {}  # by retry_after_s
        self.interval_s = 1 / grant.requests_per_second
        self._burst_s = max(0.0, BURST_S - self.interval_s)
        self.free_s = min(self.free_s, perf_counter() + self._burst_s + self.interval_s)

    def refresh_expiry(self, now_s: float) -> None:
        """Checks revocation and expiry at ``now_s`` (Unix seconds), then sets ``active_max``."""
        grant, name = self.grant, self.grant.name
        if grant.revoked:
            self._rejection = lambda: UnauthenticatedError(f"the token of {name!r} was revoked")
        elif grant.expires_s <= now_s:
            when = datetime.fromtimestamp(grant.expires_s, UTC).isoformat()
            self._rejection = lambda: UnauthenticatedError(
                f"the token of {name!r} expired at {when}"
            )
        else:
            self._rejection = None
        may_embed = self._rejection is None and "embed" in grant.roles
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
        if self._rejection is not None:
            return self._rejection()
        if "embed" not in self.grant.roles:
            return PermissionDeniedError(f"{self.grant.name!r} may not embed")
        return self._concurrency_error

    def leave(self, outcome: str) -> None:
        """Counts a request that ended with ``outcome``; it is no longer in flight."""
        self.active -= 1
        self.outcomes[outcome] += 1

    def take_outcomes(self) -> Counter[str]:
        """Returns the number of requests by outcome since the last call, and resets the counts."""
        outcomes, self.outcomes = self.outcomes, Counter()
        if self.answered_count:
            outcomes["OK"] += self.answered_count
            self.answered_count = 0
        return outcomes

    def rejection_wait_s(self, now_s: float) -> float:
        """Returns the delay, in seconds, of the next rate-limit rejection, and charges for it
        unless the delay is at its maximum.

        A caller that retries immediately after each rejection would cost the server more time in
        rejections than in responses. The delay leaves that time to other callers.
        """
        free_s = max(self._rejected_s, now_s)
        wait_s = free_s - now_s - REJECTIONS_BURST_S
        if wait_s >= REJECTION_WAIT_S_MAX:
            return REJECTION_WAIT_S_MAX
        self._rejected_s = free_s + 1 / REJECTIONS_PER_S
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
        if self._rejection is not None:
            raise self._rejection()
        if not roles & self.grant.roles:
            required = " or ".join(sorted(roles))
            raise PermissionDeniedError(f"{self.grant.name!r} is no {required}")
        if charge and (error := self._charge(perf_counter())) is not None:
            raise RateLimitedError(error.message, retry_after_s=error.retry_after_s)

    def check_model(self, requested: str, default: str) -> None:
        """Raises PermissionDeniedError for a model that the caller may not use, whether or not the
        model exists.

        Args:
            requested: NAME, NAME@VERSION or @VERSION of the model; "" if the request has none.
            default: model that serves requests without a model name.
        """
        if self.models is None:
            return
        name = requested.partition("@")[0] or default.partition("@")[0]
        if name and name not in self.models:
            raise PermissionDeniedError(
                f"{self.grant.name!r} may not ask model {shortened(name)!r}", "model"
            )

    def _charge(self, now_s: float) -> RateLimitedError | None:
        """Charges for a request by the caller's rate, within the burst allowance. Returns the
        rejection if the caller is over its rate, else None."""
        free_s = max(self.free_s, now_s)
        wait_s = free_s - now_s - self._burst_s
        if wait_s <= ROUNDING_S:
            self.free_s = free_s + self.interval_s
            return None
        retry_after_s = math.ceil(min(RETRY_S_MAX, wait_s))
        error = self._over_rate.get(retry_after_s)
        if error is None:
            rate = f"{self.grant.requests_per_second:g} requests a second"
            error = RateLimitedError(
                f"{self.grant.name!r} is over its {rate}", retry_after_s=retry_after_s
            )
            self._over_rate[retry_after_s] = error
        return error
