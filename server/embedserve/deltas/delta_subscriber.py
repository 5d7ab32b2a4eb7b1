"""Receives notifications of deltas from a broker, in a thread of the applier.

The content of a notification is not trusted: it only makes the applier poll the store earlier.
Whatever the broker does, the applier polls at its interval.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Set

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


class DeltaSubscriber:
    """A connection to the broker for all followed lines, which is opened again when it ends.

    Attributes:
        is_connected: whether notifications come.
    """

    def __init__(
        self,
        notify: Notify,
        announce: Callable[[Set[Topic]], object],
        pace_s: float,
    ) -> None:
        """
        Args:
            notify: URL of the broker, or a file with it, which is read for each connection.
            announce: called with the topics of notifications, or with none when ``is_connected``
                has changed; in the thread of the subscriber.
            pace_s: interval at which notifications are received. Those that the broker sends
                meanwhile count as one.
        """
        self.is_connected = False
        self._notify, self._announce, self._pace_s = notify, announce, pace_s
        self._topics: frozenset[Topic] = frozenset()
        self._is_failing = False

    def follow(self, topics: Iterable[Topic]) -> None:
        """Subscribes to ``topics`` within some seconds; in any thread. Former ones may still be
        announced, until the next connection."""
        self._topics = frozenset(topics)

    def start(self) -> None:
        """Starts the thread, which ends with the process."""
        threading.Thread(target=self._run, name="delta-subscriber", daemon=True).start()

    def _run(self) -> None:
        asyncio.run(self._receive_all())

    async def _receive_all(self) -> None:
        delay_s = RETRY_S
        while True:
            url, connection, start_s = None, None, time.monotonic()
            try:
                url = read_broker_url(self._notify)
                connection = open_broker(url)
                await self._receive(connection, url)
            except Exception as error:
                self._log_failure(described_error(error, url))
            self._set_connected(False)
            if connection is not None:
                await connection.close()
            if time.monotonic() - start_s > RETRY_S_MAX:
                delay_s = RETRY_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RETRY_S_MAX)

    async def _receive(self, connection: BrokerConnection, url: BrokerUrl) -> None:
        """Announces what is notified, until the connection fails."""
        await connection.connect()
        subscribed: set[Topic] = set()
        found: set[Topic] = set()
        while True:
            if new := self._topics - subscribed:
                await connection.subscribe([*new])
                subscribed |= new
                found = found | new  # deltas may have come while there was no subscription
            if not self.is_connected:
                self._set_connected(True)
                self._is_failing = False
                logger.info("notifications of deltas come from %s", url)
            if found:
                self._announce(found)
            if found or not subscribed:
                await asyncio.sleep(self._pace_s)
            found = await connection.receive() if subscribed else set()

    def _set_connected(self, is_connected: bool) -> None:
        """Sets the state, and wakes the applier, which tells the workers."""
        self.is_connected = is_connected
        self._announce(frozenset())

    def _log_failure(self, reason: str) -> None:
        if not self._is_failing:
            logger.warning("no notifications of deltas, which are found by polling: %s", reason)
        self._is_failing = True
