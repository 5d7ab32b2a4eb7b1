"""Tests of notifications over real brokers; a push succeeds in every state of the broker."""

import asyncio
import errno
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from brokers import KINDS, WAIT_S_MAX, Broker, running, tls_files
from nats.errors import SecureConnRequiredError
from server.python import environment
from store.deltas.conftest import deltas_in, tag_row
from waits import wait_until

from embedserve_store import DeltaWriter, StoreError, undo_deltas
from embedserve_store.deltas.notify import nats_broker, redis_broker
from embedserve_store.deltas.notify import notifier as module
from embedserve_store.deltas.notify.broker import NOTIFICATIONS_MAX, Topic, open_broker
from embedserve_store.deltas.notify.broker_url import read_broker_url
from embedserve_store.deltas.notify.notifier import DeltaNotifier

TOPIC = Topic("m", 1)


@pytest.fixture(params=KINDS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with running(Broker(request.param, tmp_path)) as one:
        yield one


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the timeouts. On a busy host, importing a client and connecting takes more than two
    seconds, and a response may take more than five."""
    monkeypatch.setattr(module, "CLOSE_S_MAX", WAIT_S_MAX)
    for connection in (nats_broker, redis_broker):
        monkeypatch.setattr(connection, "CONNECT_S_MAX", WAIT_S_MAX)


def stored_seqs(url: str) -> list[int]:
    """Returns the seqs that a broker keeps for TOPIC, in order."""
    return asyncio.run(_stored_seqs(url))


async def _stored_seqs(url: str) -> list[int]:
    connection: Any = open_broker(read_broker_url(url))
    await connection.connect()
    try:
        if "redis" in url:
            seqs, start = [], "-"
            while entries := await connection._redis.xrange(TOPIC.redis_key, start, count=500):
                seqs += [int(fields[b"seq"]) for _, fields in entries]
                start = f"({entries[-1][0].decode()}"
            return seqs
        return await _stored_nats_seqs(connection._client.jetstream())
    finally:
        await connection.close()


async def _stored_nats_seqs(stream: Any) -> list[int]:
    from nats.js.errors import NotFoundError, ServerError

    try:
        subscription = await stream.subscribe(TOPIC.nats_subject, ordered_consumer=True)
        consumer = await subscription.consumer_info()
    except NotFoundError:
        return []
    except ServerError as error:
        if error.err_code == 10012:  # "invalid stream": the writer is creating it
            return []
        raise
    count = consumer.delivered.consumer_seq + consumer.num_pending
    return [int((await subscription.next_msg(WAIT_S_MAX)).data) for _ in range(count)]


def test_each_push_and_undo_publishes_its_seq(store: Path, broker: Broker) -> None:
    for seq in (1, 2):  # each close waits for the notification
        with DeltaWriter(store, model="m", notify=broker.url) as writer:
            assert writer.push_rows(tag_row(seq)) == seq
    with DeltaWriter(store, model="m", notify=broker.url) as writer:
        writer.push_rows(tag_row(3), wait=False)
    undo_deltas(store, "m", to=0, why="", notify=broker.url)
    assert stored_seqs(broker.url) == [1, 2, 3, 4]


def test_broker_url_defaults_to_the_environment_variable(
    store: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "broker.url"
    file.write_text(broker.url)
    monkeypatch.setenv("EMBEDSERVE_DELTA_NOTIFY", str(file))
    with DeltaWriter(store, model="m") as writer:
        writer.push_rows({})
    undo_deltas(store, "m", to=0, why="")
    assert stored_seqs(broker.url) == [1, 2]
    monkeypatch.setenv("EMBEDSERVE_DELTA_NOTIFY", "http://broker")
    with pytest.raises(StoreError, match="delta notify: the scheme is 'http'"):
        DeltaWriter(store, model="m")


def test_broker_discards_old_notifications(broker: Broker) -> None:
    count = 2 * NOTIFICATIONS_MAX

    async def publish() -> None:
        connection = open_broker(read_broker_url(broker.url))
        await connection.connect()
        for seq in range(1, count + 1):
            await connection.publish(TOPIC, seq)
        await connection.close()

    asyncio.run(publish())
    seqs = stored_seqs(broker.url)
    assert seqs == [*range(count + 1 - len(seqs), count + 1)]
    assert NOTIFICATIONS_MAX <= len(seqs) < 1.2 * NOTIFICATIONS_MAX


def test_push_succeeds_while_the_broker_is_down(
    store: Path,
    broker: Broker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writer logs one warning. Once the broker runs again, it gets the newest seq."""
    monkeypatch.setattr(module, "RETRY_S_MAX", 0.5)
    caplog.set_level(logging.INFO, "embedserve_store")
    with DeltaWriter(store, model="m", notify=broker.url) as writer:
        writer.push_rows(tag_row(1))
        wait_until(lambda: stored_seqs(broker.url) == [1])
        broker.kill()
        for seq in (2, 3):
            assert writer.push_rows(tag_row(seq)) == seq
        wait_until(lambda: "not notified" in caplog.text)
        assert writer.push_rows(tag_row(4)) == 4
        broker.start()
        wait_until(lambda: "notified of deltas again" in caplog.text)
        assert stored_seqs(broker.url)[-1] == 4
    messages = [one.message for one in caplog.records]
    assert len([one for one in messages if "not notified" in one]) == 1
    assert broker.address in next(one for one in messages if "not notified" in one)
    assert len(deltas_in(store)) == 4


def test_push_succeeds_while_the_broker_hangs(store: Path, broker: Broker) -> None:
    """The broker stays stopped until the end of the test."""
    with DeltaWriter(store, model="m", notify=broker.url) as writer:
        writer.push_rows(tag_row(1))
        wait_until(lambda: stored_seqs(broker.url) == [1])
        broker.signal(signal.SIGSTOP)
        for seq in (2, 3):
            assert writer.push_rows(tag_row(seq)) == seq
        assert len(deltas_in(store)) == 3
        broker.signal(signal.SIGCONT)
        wait_until(lambda: stored_seqs(broker.url)[-1] == 3)


@pytest.mark.parametrize("kind", KINDS)
def test_broker_with_a_password_rejects_other_credentials(
    store: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(Broker(kind, tmp_path, has_password=True)) as broker:
        for url in (broker.address, broker.url.replace("open", "close")):
            caplog.clear()
            with DeltaWriter(store, model="m", notify=url) as writer:
                writer.push_rows({})
            wait_until(lambda: "not notified" in caplog.text)
            assert "sesame" not in caplog.text
        with DeltaWriter(store, model="m", notify=broker.url) as writer:
            writer.push_rows({})
        assert stored_seqs(broker.url) == [3]


@pytest.mark.parametrize("kind", KINDS)
def test_tls_certificate_of_the_broker_is_verified(
    store: Path,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = tls_files(tmp_path / "files")
    with running(Broker(kind, tmp_path, authority=files)) as broker:
        with DeltaWriter(store, model="m", notify=broker.url) as writer:
            writer.push_rows({})
        wait_until(lambda: "not notified" in caplog.text)
        assert "certificate" in caplog.text.lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(files / "root.pem"))
        with DeltaWriter(store, model="m", notify=broker.url) as writer:
            writer.push_rows({})
        assert stored_seqs(broker.url) == [2]


@pytest.mark.parametrize("kind", KINDS)
def test_connection_whose_tls_handshake_failed_is_closed_at_once(tmp_path: Path, kind: str) -> None:
    """Covers a command that ends after its only notification: it has to log why that failed."""

    async def fail_to_connect(url: str) -> None:
        connection = open_broker(read_broker_url(url))
        with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
            await connection.connect()
        async with asyncio.timeout(WAIT_S_MAX / 4):
            await connection.close()

    with running(Broker(kind, tmp_path, authority=tls_files(tmp_path / "files"))) as broker:
        asyncio.run(fail_to_connect(broker.url))


def test_password_is_not_sent_to_a_nats_broker_without_tls() -> None:
    """Covers someone between writer and broker who takes the offer of TLS out."""
    received, is_closed = bytearray(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"auth_required": true, "max_payload": 1048576}\r\n')
        while data := await reader.read(4096):
            received.extend(data)
            writer.write(b"PONG\r\n")
        writer.close()
        await writer.wait_closed()
        is_closed.set()

    async def connect() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connection = open_broker(read_broker_url(f"tls://trainer:sesame@127.0.0.1:{port}"))
            try:
                with pytest.raises(SecureConnRequiredError):
                    await connection.connect()
            finally:
                await connection.close()
            await is_closed.wait()

    asyncio.run(connect())
    assert received == b""


def test_no_task_is_left_of_a_nats_connection_that_is_lost_while_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio would log an error when it collects the task."""

    async def lose_connection(url: str) -> None:
        connection: Any = open_broker(read_broker_url(url))
        await connection.connect()
        await connection.subscribe([TOPIC])
        client = connection._client
        drain = AsyncMock(side_effect=ConnectionResetError)
        monkeypatch.setattr(client._transport, "drain", drain)
        await client._send_command(b"PING\r\n")  # which the close drains
        await connection.close()
        drain.assert_awaited()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, left = await asyncio.wait(others, timeout=WAIT_S_MAX / 4)
            assert not left

    with running(Broker("nats", tmp_path)) as broker:
        asyncio.run(lose_connection(broker.url))


def fail_to_start(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def fail_to_open(self: asyncio.Runner) -> asyncio.Runner:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("where", "name", "fail", "reason"),
    [
        (threading.Thread, "start", fail_to_start, "can't start new thread"),
        (asyncio.Runner, "__enter__", fail_to_open, "[Errno 24] Too many open files"),
    ],
)
def test_push_succeeds_without_a_thread_or_event_loop_and_the_next_push_notifies(
    where: type,
    name: str,
    fail: Callable[[Any], Any],
    reason: str,
    store: Path,
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "embedserve_store")
    with DeltaWriter(store, model="m", notify=broker.url) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(where, name, fail)
            for seq in (1, 2):
                assert writer.push_rows(tag_row(seq)) == seq
            wait_until(lambda: "delta-notify" not in [one.name for one in threading.enumerate()])
        assert writer.push_rows(tag_row(3)) == 3
    assert stored_seqs(broker.url) == [3]
    messages = [one.message for one in caplog.records]
    assert [one for one in messages if "notified" in one] == [
        f"servers are not notified of deltas, and find them by polling: {reason}",
        f"servers are notified of deltas again, over {broker.address}",
    ]


def test_notifier_with_nothing_to_send_starts_no_thread(broker: Broker) -> None:
    notifier = DeltaNotifier(broker.url, TOPIC)
    notifier.close()
    assert notifier._thread is None


def test_broker_clients_are_not_imported_without_a_broker() -> None:
    code = (
        "import sys, embedserve_store, embedserve.config_checks, embedserve.deltas.applier_process;"
        "print([one for one in ('redis', 'nats', 'embedserve_store.deltas.notify.broker')"
        " if one in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
