"""Tests of delta notifications: they end the applier's wait early, and a faulty broker has no other
effect."""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from brokers import KINDS, PASSWORD, WAIT_S_MAX, Broker, FakeBroker, running
from server.deltas.followed import Followed
from server.deltas.test_applier_process import ApplierProcess
from waits import wait_until

from embedserve.config import ServeSettings
from embedserve.config_checks import check_settings
from embedserve.deltas import delta_subscriber as module
from embedserve.deltas.delta_subscriber import DeltaSubscriber
from embedserve_store import DeltaWriter
from embedserve_store.deltas.notify import nats_broker, redis_broker
from embedserve_store.deltas.notify.broker import BrokerConnection, Topic, open_broker
from embedserve_store.deltas.notify.broker_url import BrokerUrl, read_broker_url

TOPIC, OTHER, LATER = Topic("m", 1), Topic("n", 3), Topic("m", 7)
PACE_S = 0.05


class Subscription(DeltaSubscriber):
    """A subscriber to a broker that ends before the process does.

    Attributes:
        counts: number of announcements by topic.
        is_over: whether those of the test end.
    """

    is_over = False

    def __init__(self, url: str | Path) -> None:
        self.counts = {TOPIC: 0, OTHER: 0, LATER: 0}
        super().__init__(url, self.announce, PACE_S)
        self.follow([TOPIC, OTHER])
        self.start()

    def announce(self, topics: Iterable[Topic]) -> None:
        for topic in topics:
            self.counts[topic] += 1

    def _run(self) -> None:
        with suppress(SystemExit):
            super()._run()

    async def _receive(self, connection: BrokerConnection, url: BrokerUrl) -> None:
        if self.is_over:
            raise SystemExit
        await super()._receive(connection, url)

    @property
    def count(self) -> int:
        return self.counts[TOPIC]


@pytest.fixture(params=KINDS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with running(Broker(request.param, tmp_path)) as one:
        yield one


@pytest.fixture(autouse=True)
def short_timeouts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Shortens the timeouts of unresponsive brokers. Ends the subscribers after the broker."""
    caplog.set_level(logging.INFO, "embedserve")
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    monkeypatch.setattr(module, "RETRY_S_MAX", 0.2)
    for broker in (redis_broker, nats_broker):
        monkeypatch.setattr(broker, "CONNECT_S_MAX", 2.0)
        monkeypatch.setattr(broker, "IDLE_S", 0.2)
    yield
    monkeypatch.setattr(Subscription, "is_over", True)
    for thread in threading.enumerate():
        if thread.name == "delta-subscriber":
            thread.join(WAIT_S_MAX)
            assert not thread.is_alive()


LONG_CONNECT_S = 20.0


@pytest.fixture
def long_connect_timeout(short_timeouts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthens the timeout, so that a subscriber keeps its one connection to a broker on a busy
    machine."""
    set_connect_s_max(monkeypatch, LONG_CONNECT_S)


def set_connect_s_max(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for broker in (redis_broker, nats_broker):
        monkeypatch.setattr(broker, "CONNECT_S_MAX", seconds)


def publish(url: str, *topics: Topic, seq: int = 1) -> None:
    """Publishes once the broker accepts it: a broker that has just started may not do so yet."""
    wait_until(lambda: is_published(url, *topics, seq=seq))


def is_published(url: str, *topics: Topic, seq: int) -> bool:
    async def run() -> None:
        connection = open_broker(read_broker_url(url))
        try:
            await connection.connect()
            for topic in topics:
                await connection.publish(topic, seq)
        finally:
            await connection.close()

    try:
        asyncio.run(run())
    except Exception:
        return False
    return True


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.usefixtures("long_connect_timeout")
def test_each_notification_is_announced(broker: Broker) -> None:
    """Covers any seq, as the subscriber ignores the content. Notifications before the connection
    count as one."""
    publish(broker.url, TOPIC)
    subscription = Subscription(broker.url)
    wait_until(lambda: subscription.counts == {TOPIC: 1, OTHER: 1, LATER: 0})
    assert subscription.is_connected
    for seq in (7, 7, 3):
        before = subscription.count
        publish(broker.url, TOPIC, seq=seq)
        wait_until(lambda: subscription.count > before)  # noqa: B023
    assert subscription.counts[OTHER] == 1
    publish(broker.url, OTHER)
    wait_until(lambda: subscription.counts[OTHER] > 1)


@pytest.mark.usefixtures("long_connect_timeout")
def test_subscriber_reconnects_and_warns_once_per_broker_outage(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks for one warning per outage, whatever the number of attempts."""
    attempts = []

    def open_and_count(url: BrokerUrl) -> BrokerConnection:
        attempts.append(url)
        return open_broker(url)

    monkeypatch.setattr(module, "open_broker", open_and_count)
    subscription = Subscription(broker.url)
    for outage in (1, 2):
        wait_until(lambda: subscription.is_connected)
        wait_until(lambda: subscription.count >= outage)  # noqa: B023
        broker.kill()
        wait_until(lambda: not subscription.is_connected)
        enough = len(attempts) + 3
        wait_until(lambda: len(attempts) >= enough)  # noqa: B023
        assert len(warnings(caplog)) == outage
        broker.start()
    wait_until(lambda: subscription.is_connected and subscription.count >= 3)
    assert broker.address in warnings(caplog)[0]
    before = subscription.count
    publish(broker.url, TOPIC)
    wait_until(lambda: subscription.count > before)


def test_hanging_broker_counts_as_disconnected(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription = Subscription(broker.url)
    wait_until(lambda: subscription.is_connected)
    set_connect_s_max(monkeypatch, 0.3)  # ends attempts to connect to the stopped broker
    broker.signal(signal.SIGSTOP)
    wait_until(lambda: not subscription.is_connected)
    broker.signal(signal.SIGCONT)
    wait_until(lambda: subscription.is_connected)


def test_url_file_is_read_for_each_connection(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers changes of the password, and a file that is temporarily missing."""
    file = tmp_path / "broker.url"
    subscription = Subscription(file)
    wait_until(lambda: warnings(caplog))
    assert "is no URL, and no file that can be read" in warnings(caplog)[0]
    file.write_text(broker.url)
    wait_until(lambda: subscription.is_connected)


@pytest.mark.usefixtures("long_connect_timeout")
def test_flood_of_notifications_is_announced_at_a_limited_rate(broker: Broker) -> None:
    """Checks that one announcement in PACE_S stands for all notifications in that time."""
    subscription = Subscription(broker.url)
    wait_until(lambda: subscription.count)
    begin_s, before = time.monotonic(), subscription.count
    publish(broker.url, *[TOPIC] * 3000)
    wait_until(lambda: subscription.count > before)
    announced, took_s = subscription.count - before, time.monotonic() - begin_s
    assert announced <= took_s / PACE_S + 1
    assert subscription.is_connected


@pytest.mark.parametrize("kind", KINDS)
def test_denied_access_is_logged_without_the_password(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(Broker(kind, tmp_path, has_password=True)) as broker:
        denied = Subscription(broker.address)
        wait_until(lambda: warnings(caplog))
        assert not denied.is_connected
        allowed = Subscription(broker.url)
        wait_until(lambda: allowed.is_connected)
        publish(broker.url, TOPIC)
        wait_until(lambda: allowed.count > 1)
        assert denied.count == 0
    assert "sesame" not in caplog.text
    assert PASSWORD not in caplog.text


GARBAGE = {
    "noise": (bytes(range(256)) * 4,),
    "nothing": (b"",),
    "endless line": (b"x" * 65536,) * 2,
    "endless array": (b"*1000000000\r\n", b":1\r\n" * 10_000),
    "endless string": (b"$100000000000\r\n", b"x" * 65536),
    "nested": (b"*1\r\n" * 10_000,) * 2,
    "negative": (b"*-5\r\n$-7\r\n",) * 2,
    "unexpected": (b"+PONG\r\n" * 100 + b":7\r\n" * 100,),
    "long MSG": (b"INFO {}\r\n", b"PONG\r\n", b"MSG a 1 99999999999\r\n", b"x" * 65536),
    "endless INFO": (b"INFO ", b"{" * 65536),
    "second INFO": (b"INFO {}\r\n", b"PONG\r\n", b"INFO ", b"{" * 65536),
    "malformed": (b"INFO {}\r\n", b"PONG\r\n", b"MSG \xff x y\r\nHMSG a 1 9 3\r\n\0\r\n"),
}
"""Data that a broker sends. The last of several parts repeats endlessly."""
BUFFERED_BYTES = 16 << 20
"""Maximum bytes that the kernel buffers for a connection that is not read."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_from_the_broker_is_read_within_limits(
    kind: str, garbage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the subscriber closes the connection, and connects again later."""
    parts = GARBAGE[garbage]
    if garbage == "nothing":
        set_connect_s_max(monkeypatch, 0.3)  # only this ends it
    fake = FakeBroker(*parts, is_endless=len(parts) > 1)
    try:
        subscription = Subscription(f"{kind}://127.0.0.1:{fake.port}")
        wait_until(lambda: fake.connections >= 3)
        assert subscription.count <= fake.connections
        assert fake.sent_bytes_max < BUFFERED_BYTES
    finally:
        fake.close()
    assert [one for one in warnings(caplog) if "found by polling" not in one] == []


def test_notified_delta_is_applied_before_the_next_poll(broker: Broker, tmp_path: Path) -> None:
    """Polls are an hour apart, so the test waits for the connection before it pushes."""
    followed = Followed(tmp_path / "store")
    applier = ApplierProcess(followed, tmp_path / "store", poll_s=3600.0, notify=broker.url)
    try:
        wait_until(lambda: followed.broker_connected.is_set)
        with DeltaWriter(tmp_path / "store", model="m", notify=broker.url) as writer:
            for seq in (1, 2):
                writer.push_rows({})
                wait_until(lambda: followed.live.seq == seq)  # noqa: B023
            broker.kill()
            wait_until(lambda: not followed.broker_connected.is_set)
            writer.push_rows({})
            broker.start()  # the applier polls after a new connection
            wait_until(lambda: followed.live.seq == 3)
    finally:
        applier.kill()


def test_polling_finds_all_deltas_while_the_broker_is_killed_and_floods(
    broker: Broker, tmp_path: Path
) -> None:
    """Covers forged seqs, and kill -9 of the broker during pushes: every delta is applied, in
    order."""
    followed = Followed(tmp_path / "store")
    applier = ApplierProcess(followed, tmp_path / "store", poll_s=0.05, notify=broker.url)
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            is_published(broker.url, *[TOPIC] * 50, seq=1 << 40)  # fails while it is down

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        with DeltaWriter(tmp_path / "store", model="m", notify=broker.url) as writer:
            for seq in range(1, 31):
                assert writer.push_rows({"t": ([seq % 20], [[1.0] * 4])}) == seq
                if seq % 10 == 0:
                    broker.kill()
                if seq % 10 == 5 and broker.process is None:
                    broker.start()
            wait_until(lambda: followed.live.seq == 30)
        assert followed.status.read().refused == 0
    finally:
        is_over.set()
        thread.join()
        applier.kill()


@pytest.mark.parametrize(
    ("notify", "reason"),
    [
        ("http://me:secret@broker", "delta notify: the scheme is 'http'"),
        ("/no/such/file", "delta notify /no/such/file: is no URL, and no file"),
    ],
)
def test_invalid_delta_notify_setting_is_rejected(notify: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        check_settings(ServeSettings(store="store", deltas="follow", delta_notify=notify))
    assert "secret" not in str(caught.value)
    check_settings(ServeSettings(store="store", delta_notify=notify))  # unused without deltas


@pytest.mark.usefixtures("long_connect_timeout")
def test_line_followed_after_connecting_is_announced(broker: Broker) -> None:
    """Covers a server that switches to a version that begins a line of its own."""
    subscription = Subscription(broker.url)
    wait_until(lambda: subscription.count)
    publish(broker.url, LATER)
    subscription.follow([LATER])
    wait_until(lambda: subscription.counts[LATER] == 1)  # deltas may have come before
    publish(broker.url, LATER, seq=2)
    wait_until(lambda: subscription.counts[LATER] >= 2)


class KeepingConnection:
    """A connection that keeps the topics that it returns, as that of NATS does. The subscriber
    follows LATER from then on."""

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self.kept = {TOPIC}
        self.receives = 0

    async def connect(self) -> None:
        pass

    async def subscribe(self, topics: Sequence[Topic]) -> None:
        pass

    async def receive(self) -> set[Topic]:
        if self.subscription is None:
            raise ConnectionError  # the subscriber connects again
        self.receives += 1
        if self.receives > 1:
            raise ConnectionError
        self.subscription.follow([LATER])
        return self.kept

    async def close(self) -> None:
        pass


def test_topics_of_the_channel_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a line which is followed later is announced once: NATS's connection would
    subscribe to what was added, and announce it again."""
    connection = KeepingConnection()
    monkeypatch.setattr(module, "open_broker", lambda url: connection)
    connection.subscription = Subscription("nats://127.0.0.1:1")
    wait_until(lambda: connection.receives >= 2)
    assert connection.kept == {TOPIC}
