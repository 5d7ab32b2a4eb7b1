"""Notifies servers of deltas that a writer has published. Never delays or fails a push."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress

from embedserve_store.deltas.notify.broker import (
    RETRY_S,
    RETRY_S_MAX,
    BrokerConnection,
    Topic,
    described_error,
    open_broker,
)
from embedserve_store.deltas.notify.broker_url import BrokerUrl, Notify, read_broker_url

logger = logging.getLogger(__name__)

CLOSE_S_MAX = 2.0
"""Seconds that ``close`` waits for the last notification. Without it servers poll."""


class DeltaNotifier:
    """Sends the seq of the newest delta of a line, in a thread.

    While the broker does not take it, it is sent again at growing intervals, or the seq of a newer
    delta in its place. A change between success and failure is logged once.
    """

    def __init__(self, notify: Notify, topic: Topic) -> None:
        """
        Args:
            notify: URL of the broker, or a file with it, which is read for each connection.
        """
        self._notify, self._topic = notify, topic
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._seq = 0
        self._is_closing = False
        self._is_failing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None

    def notify(self, seq: int) -> None:
        """Sends ``seq`` off this thread. If no thread or event loop can be started, the next call
        tries again."""
        with self._lock:
            self._seq = seq
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="delta-notify", daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as error:
                    self._log_failure(str(error))
                    return
                self._thread = thread
        self._wake()

    def close(self) -> None:
        """Waits for the last notification, at most CLOSE_S_MAX, and ends the thread."""
        with self._lock:
            self._is_closing = True
            thread = self._thread
        self._wake()
        if thread is not None:
            thread.join(CLOSE_S_MAX)

    def _wake(self) -> None:
        with self._lock:
            if self._loop is not None and self._changed is not None:
                with suppress(RuntimeError):  # the thread has ended
                    self._loop.call_soon_threadsafe(self._changed.set)

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._send_all())
        except OSError as error:  # no descriptors are left for an event loop
            self._log_failure(str(error))
            with self._lock:  # the thread counts as alive for some time
                self._thread = None

    async def _send_all(self) -> None:
        changed = asyncio.Event()
        with self._lock:
            self._loop, self._changed = asyncio.get_running_loop(), changed
        connection: BrokerConnection | None = None
        url: BrokerUrl | None = None
        sent, delay_s = 0, RETRY_S
        while True:
            changed.clear()
            seq = self._seq
            if seq == sent:
                if self._is_closing:
                    break
                await changed.wait()
                continue
            is_new = connection is None
            try:
                if connection is None:
                    url = None
                    url = read_broker_url(self._notify)
                    connection = open_broker(url)
                    await connection.connect()
                await connection.publish(self._topic, seq)
                sent, delay_s = seq, RETRY_S
                self._log_success(url)
            except Exception as error:
                if connection is not None:
                    await connection.close()
                connection = None
                if not is_new:  # the broker may have ended a connection that waited for long
                    continue
                self._log_failure(described_error(error, url))
                if self._is_closing:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        while not self._is_closing:
                            await changed.wait()
                            changed.clear()
                delay_s = min(2 * delay_s, RETRY_S_MAX)
        if connection is not None:
            await connection.close()

    def _log_success(self, url: BrokerUrl | None) -> None:
        if self._is_failing:
            logger.info("servers are notified of deltas again, over %s", url)
        self._is_failing = False

    def _log_failure(self, reason: str) -> None:
        if not self._is_failing:
            logger.warning(
                "servers are not notified of deltas, and find them by polling: %s", reason
            )
        self._is_failing = True
