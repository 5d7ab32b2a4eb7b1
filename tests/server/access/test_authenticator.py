"""Tests of authentication: callers, their permissions, and the error of each rejected request."""

import json
import logging
import re
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from server.access.clocks import Clocks

from embedserve.access.authenticator import (
    CACHED_MAX,
    UNKNOWN,
    Authenticator,
    ClientCertificate,
    certificate_of,
)
from embedserve.access.caller_quota import (
    REJECTION_WAIT_S_MAX,
    REJECTIONS_BURST_S,
    REJECTIONS_PER_S,
    CallerQuota,
)
from embedserve.access.grants import NEVER, Grant, new_token, read_grants
from embedserve.errors import (
    EmbedServeError,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
)

NOW_S = 1_800_000_000.0


class FakeTarget:
    """A request with an Authorization header or a client certificate."""

    def __init__(
        self, authorization: str | None = None, certificate: ClientCertificate | None = None
    ) -> None:
        self.authorization = None if authorization is None else authorization.encode()
        self.certificate = certificate
        self.quota: CallerQuota | None = None
        self.start_s = perf_counter()
        self.can_delay_rejection = True

    def reject_after(self, error: EmbedServeError, wait_s: float) -> None:
        self.wait_s = wait_s
        raise error


class Tokens:
    """A token file, and an authenticator that reads it once the file has a line."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens"
        self.path.write_text("")
        self.clocks = Clocks(NOW_S)

    @cached_property
    def access(self) -> Authenticator:
        return Authenticator(str(self.path), self.clocks.clock)

    async def add(self, name: str, **keys: Any) -> str:
        token, sha256 = new_token()
        line = json.dumps({"name": name, "sha256": sha256, **keys})
        await self.write(self.path.read_text() + line + "\n")
        return token

    async def write(self, text: str) -> None:
        self.path.write_text(text)
        await self.access.reloader.poll()

    def admit(self, token: str) -> FakeTarget:
        return self.admit_target(FakeTarget(f"Bearer {token}"))

    def admit_target(self, target: FakeTarget) -> FakeTarget:
        assert self.access.admit(target, target.authorization)
        return target

    def rejection(
        self, authorization: str | None, certificate: ClientCertificate | None = None
    ) -> str:
        with pytest.raises(EmbedServeError) as raised:
            self.admit_target(FakeTarget(authorization, certificate))
        return f"{raised.value.http_status} {raised.value.message}"


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


async def test_only_active_callers_with_the_embed_role_may_embed(tokens: Tokens) -> None:
    await tokens.add("ranker", concurrent=1)
    await tokens.add("lost", revoked=True)
    await tokens.add("late", expires="2020-01-01")
    await tokens.add("boss", roles=["admin"])
    names = ("ranker", "lost", "late", "boss", "nobody")
    assert [name for name in names if tokens.access.may_embed(name)] == ["ranker"]
    await tokens.write(tokens.path.read_text().splitlines()[-1])
    assert not tokens.access.may_embed("ranker")


async def test_each_kind_of_invalid_token_has_its_own_error(tokens: Tokens) -> None:
    right = await tokens.add("right")
    expired = await tokens.add("late", expires="2020-01-01")
    revoked = await tokens.add("lost", revoked=True)
    admin = await tokens.add("boss", roles=["admin"])
    foreign, _ = new_token()
    assert tokens.admit(right).quota is not None
    tokens.admit_target(FakeTarget(f"bearer   {right}"))
    assert tokens.rejection(None).startswith("401 the request has no credentials")
    assert tokens.rejection("") == "401 Authorization is not Bearer and one token"
    assert tokens.rejection(f"Basic {right}") == "401 Authorization is not Bearer and one token"
    wrong = tokens.rejection("Bearer hunter2")
    assert wrong == "401 the token is wrong: embedserve makes no such tokens"
    assert tokens.rejection(f"Bearer {foreign}").startswith("401 the token is unknown")
    assert tokens.rejection(f"Bearer {right[:-1]}").startswith("401 the token is unknown")
    assert tokens.rejection(f"Bearer {expired}") == (
        "401 the token of 'late' expired at 2020-01-01T00:00:00+00:00"
    )
    assert tokens.rejection(f"Bearer {revoked}") == "401 the token of 'lost' was revoked"
    assert tokens.rejection(f"Bearer {admin}") == "403 'boss' may not embed"


async def test_token_expires_on_time_despite_a_clock_jump(
    tokens: Tokens,
) -> None:
    token = await tokens.add("x", expires="2027-01-15T08:01:40Z")  # 100 s after the start
    tokens.clocks.wall_s += 86400
    for _ in range(99):
        tokens.access.refresh_expiry()
        tokens.admit(token)
        tokens.clocks.pass_s(1)
    tokens.clocks.pass_s(1)
    tokens.access.refresh_expiry()
    assert "expired" in tokens.rejection(f"Bearer {token}")


async def test_expiry_follows_corrections_of_the_host_clock(tokens: Tokens) -> None:
    token = await tokens.add("x", expires="2027-01-15T08:01:40Z")  # 100 s after the start
    for _ in range(25):
        tokens.admit(token)
        tokens.clocks.pass_s(1)
        tokens.clocks.wall_s += 3
        tokens.access.refresh_expiry()
    assert "expired" in tokens.rejection(f"Bearer {token}")


async def test_removed_token_is_rejected_immediately(tokens: Tokens) -> None:
    first, second = await tokens.add("first"), await tokens.add("second")
    for one in (first, second):
        tokens.admit(one)
    lines = tokens.path.read_text().splitlines()
    await tokens.write(lines[1])
    assert "unknown" in tokens.rejection(f"Bearer {first}")
    tokens.admit(second)


async def test_revocation_applies_once_the_file_is_read(tokens: Tokens) -> None:
    """Covers vector lookups, and requests by the same token to the management routes."""
    token = await tokens.add("x", roles=["embed", "admin"])
    right, revoked = tokens.path.read_text(), r"^the token of 'x' was revoked$"

    def check(role: str) -> CallerQuota:
        return tokens.access.check(f"Bearer {token}".encode(), None, frozenset({role}))

    assert tokens.admit(token).quota is check("admin")
    await tokens.write(json.dumps(json.loads(right) | {"revoked": True}))
    with pytest.raises(UnauthenticatedError, match=revoked):
        tokens.admit(token)
    with pytest.raises(UnauthenticatedError, match=revoked):
        check("admin")
    await tokens.write(right)
    assert tokens.admit(token).quota is check("admin")


async def test_invalid_line_keeps_the_previous_tokens_and_is_logged_once(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    token = await tokens.add("first")
    caplog.clear()
    good = tokens.path.read_text()
    for _ in range(3):
        await tokens.write(good + '{"name": "half')
    tokens.admit(token)
    (record,) = caplog.records
    assert "line 2: no JSON" in record.getMessage()
    tokens.path.unlink()
    await tokens.access.reloader.poll()
    tokens.admit(token)
    await tokens.write(good)
    assert "and right" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("text", ["", "# the lines follow\n\n"])
async def test_file_without_callers_keeps_the_previous_tokens(
    tokens: Tokens, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """Covers a program that truncates the file before it writes."""
    token = await tokens.add("x")
    client, good = tokens.admit(token).quota, tokens.path.read_text()
    await tokens.write(text)
    (record,) = (one for one in caplog.records if one.levelno == logging.ERROR)
    assert f"{tokens.path} has no line of a caller; what was read before" in record.getMessage()
    assert tokens.admit(token).quota is client
    await tokens.write(good)
    assert tokens.admit(token).quota is client


async def test_concurrency_limit_survives_a_reload(tokens: Tokens) -> None:
    token = await tokens.add("x", concurrent=2)
    first, _ = tokens.admit(token), tokens.admit(token)
    await tokens.add("y")
    limited = "429 'x' has 2 requests in flight, which is its limit"
    assert tokens.rejection(f"Bearer {token}") == limited
    assert first.quota is not None
    first.quota.leave("OK")
    tokens.admit(token)
    assert tokens.rejection(f"Bearer {token}") == limited


@pytest.mark.parametrize("rate", [0.01, 5e-324])
async def test_caller_over_a_low_rate_waits_for_a_minute(tokens: Tokens, rate: float) -> None:
    slow = await tokens.add("slow", requests_per_second=rate)
    tokens.admit(slow)
    with pytest.raises(RateLimitedError, match=f"'slow' is over its {rate:g} requests") as raised:
        tokens.admit(slow)
    assert raised.value.retry_after_s == 60


async def test_rate_limit_allows_a_burst_of_one_second(tokens: Tokens) -> None:
    some = FakeTarget(f"Bearer {await tokens.add('some', requests_per_second=5)}")
    for _ in range(5):  # concurrently
        tokens.admit_target(some)
    with pytest.raises(RateLimitedError) as raised:
        tokens.admit_target(some)
    assert raised.value.retry_after_s == 1


@pytest.mark.parametrize("raised_to", [1000.0, NEVER])
def test_raised_rate_applies_immediately(raised_to: float) -> None:
    """Checks that a higher rate keeps no debt from charges at the old rate."""
    client = CallerQuota(Grant("x", requests_per_second=0.001))
    client.refresh_expiry(NOW_S)
    assert client.admission_error(perf_counter()) is None
    client.set_grant(client.grant)  # as when another line changes
    assert isinstance(client.admission_error(perf_counter()), RateLimitedError)
    client.set_grant(Grant("x", requests_per_second=raised_to))
    assert client.admission_error(perf_counter() + 0.01) is None


def test_reload_renews_no_burst() -> None:
    client = CallerQuota(Grant("x", requests_per_second=5))
    client.refresh_expiry(NOW_S)
    now_s = perf_counter()
    assert [client.admission_error(now_s) for _ in range(5)] == [None] * 5
    client.set_grant(client.grant)  # as when another line changes
    assert isinstance(client.admission_error(now_s), RateLimitedError)


def test_full_burst_is_admitted_at_any_clock_value() -> None:
    for i in range(1000):
        now_s = 12345.678 * i + 0.1
        client = CallerQuota(Grant("x", requests_per_second=5))
        client.refresh_expiry(NOW_S)
        errors = [client.admission_error(now_s) for _ in range(6)]
        assert [error is None for error in errors] == [True] * 5 + [False]


async def test_frequent_rejections_are_delayed(tokens: Tokens) -> None:
    token, now_s = await tokens.add("x", requests_per_second=1), perf_counter()
    client = tokens.admit(token).quota
    assert client is not None
    at_once = int(REJECTIONS_BURST_S * REJECTIONS_PER_S)
    waits_s = [client.rejection_wait_s(now_s) for _ in range(2 * REJECTIONS_PER_S)]
    assert waits_s[:at_once] == [0.0] * at_once
    assert 0 < waits_s[at_once + 1] <= 2 / REJECTIONS_PER_S
    assert waits_s == sorted(waits_s)
    assert waits_s[-1] == REJECTION_WAIT_S_MAX
    for can_delay, is_revoked in ((True, False), (False, False), (True, True)):
        client.set_grant(Grant("x", requests_per_second=1, revoked=is_revoked))
        client.refresh_expiry(NOW_S)
        target = FakeTarget(f"Bearer {token}")
        target.start_s, target.can_delay_rejection = now_s, can_delay
        with pytest.raises(UnauthenticatedError if is_revoked else RateLimitedError):
            tokens.admit_target(target)
        assert target.wait_s == (REJECTION_WAIT_S_MAX if can_delay and not is_revoked else 0.0)
    assert client.rejection_wait_s(now_s + 10) == 0.0


async def test_tokens_may_be_limited_to_models(tokens: Tokens) -> None:
    client = tokens.admit(await tokens.add("x", models=["shop"])).quota
    assert client is not None
    for model, default in (("shop", "films"), ("shop@3", ""), ("", "shop"), ("@old", "shop@3")):
        client.check_model(model, default)
    for model, default in (("films", "shop"), ("none@3", "shop"), ("", "films"), ("@3", "films")):
        with pytest.raises(PermissionDeniedError, match=r"'x' may not ask model '(films|none)'"):
            client.check_model(model, default)


async def test_certificate_names_identify_callers(tokens: Tokens) -> None:
    await tokens.write('{"name": "ranker", "certificate": "spiffe://cluster/ranker"}\n')
    right = ClientCertificate(("any", "spiffe://cluster/ranker"), NOW_S + 10)
    target = FakeTarget(None, right)
    tokens.admit_target(target)
    assert target.quota is not None
    assert target.quota.grant.name == "ranker"
    stranger = ClientCertificate(("stranger",), NOW_S + 10)
    assert "belongs to no caller" in tokens.rejection(None, stranger)
    await tokens.add("by-token")
    nameless = ClientCertificate(("",), NOW_S + 10)
    assert "belongs to no caller" in tokens.rejection(None, nameless)
    tokens.admit_target(FakeTarget(None, right))  # cached again: each reload empties the cache
    assert "Bearer" in tokens.rejection("x", right)  # Authorization comes first
    tokens.clocks.pass_s(11)
    tokens.access.refresh_expiry()
    assert tokens.rejection(None, right) == "401 the client's certificate has expired"


def test_names_of_a_certificate_are_read() -> None:
    found = {
        "subject": ((("organizationName", "x"),), (("commonName", "ranker"),)),
        "subjectAltName": (("DNS", "a.b"), ("IP Address", "1.2.3.4"), ("URI", "spiffe://x")),
    }
    certificate = certificate_of(found, 5.0)
    assert certificate is not None
    assert certificate.names == ("ranker", "a.b", "spiffe://x")
    assert certificate_of(None, 5.0) is None


async def test_credential_cache_is_bounded(tokens: Tokens) -> None:
    token = await tokens.add("x")
    for spaces in range(2 * CACHED_MAX):
        tokens.admit_target(FakeTarget("Bearer " + " " * spaces + token))
    assert len(tokens.access._cached) <= CACHED_MAX
    for _ in range(100):
        with pytest.raises(UnauthenticatedError):
            tokens.admit_target(FakeTarget(f"Bearer {new_token()[0]}"))
    assert len(tokens.access._cached) <= CACHED_MAX


async def test_requests_are_counted_by_caller(tokens: Tokens) -> None:
    token, late = await tokens.add("x", concurrent=1), await tokens.add("late", revoked=True)
    target = tokens.admit(token)
    tokens.rejection(f"Bearer {token}")  # a request is in flight
    tokens.rejection(f"Bearer {late}")
    tokens.rejection("Bearer hunter2")
    await tokens.add("y")  # earlier counts survive a reload
    assert target.quota is not None
    target.quota.leave("OK")
    assert dict(tokens.access.take_counts()) == {
        "x": {"RESOURCE_EXHAUSTED": 1, "OK": 1},
        "late": {"UNAUTHENTICATED": 1},
        UNKNOWN: {"UNAUTHENTICATED": 1},
    }
    assert tokens.access.take_counts() == []
    assert tokens.access.names == {"x", "late", "y", UNKNOWN}


async def test_idle_callers_cost_no_counter(tokens: Tokens) -> None:
    """Guards against a cost per name: a token file may have thousands, and the counts are taken
    twice a second."""
    target = tokens.admit(await tokens.add("x"))
    assert target.quota is not None
    before = target.quota.outcomes
    assert tokens.access.take_counts() == []
    assert target.quota.outcomes is before
    target.quota.answered_count += 1  # as the fast path counts
    assert tokens.access.take_counts() == [("x", {"OK": 1})]
    assert tokens.access.take_counts() == []


async def test_caller_names_are_cached_until_the_file_is_reloaded(tokens: Tokens) -> None:
    await tokens.add("x")
    names = tokens.access.names
    assert tokens.access.names is names
    await tokens.add("y")
    assert tokens.access.names == {*names, "y"}


def test_caller_keeps_its_limits_when_its_token_is_replaced(tmp_path: Path) -> None:
    """Checks that both tokens of a caller, while the caller has two, share one rate."""
    (old, old_hash), (new, new_hash), path = new_token(), new_token(), tmp_path / "tokens"
    limits = {"name": "ranker", "requests_per_second": 0.01}
    path.write_text(json.dumps({**limits, "sha256": old_hash}))
    access = Authenticator(str(path))

    def quota_of(token: str) -> CallerQuota:
        return access.check(f"Bearer {token}".encode(), None, frozenset({"embed"}), charge=False)

    client = quota_of(old)
    for hashes in ([old_hash, new_hash], [new_hash]):
        path.write_text(json.dumps({**limits, "sha256": hashes}))
        access._adopt(read_grants(str(path)))
        assert quota_of(new) is client
    with pytest.raises(UnauthenticatedError, match="unknown"):
        quota_of(old)
    path.write_text(json.dumps({**limits, "sha256": [old_hash, new_hash]}))
    access._adopt(read_grants(str(path)))
    for token, is_over in ((old, False), (new, True)):
        authorization = f"Bearer {token}".encode()
        if is_over:
            with pytest.raises(RateLimitedError):
                access.check(authorization, None, frozenset({"embed"}))
        else:
            access.check(authorization, None, frozenset({"embed"}))


def test_invalid_line_is_named_with_its_file_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("{}")
    where = re.escape(f"tokens: {path}, line 1")
    with pytest.raises(ValueError, match=f"^{where}: name is missing$"):
        Authenticator(str(path))
