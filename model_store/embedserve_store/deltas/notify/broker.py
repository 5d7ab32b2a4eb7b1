"""Connections to a broker, as writers and servers use them: their topics, and errors in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from embedserve_store.deltas.notify.broker_url import BrokerUrl

NOTIFICATIONS_MAX = 1000
"""Notifications that the broker keeps for each line. Nobody needs old ones: the newest says all."""
KEPT_S = 86_400
"""Seconds after which the broker forgets those of a line that has no new deltas."""
ANSWER_BYTES_MAX = 256 << 10
"""Bytes of one response of the broker, and of those that are not read yet; 256 KiB. A notification
has some ten."""
CONNECT_S_MAX = 5.0
"""Seconds for a connection and for each request to the broker."""
IDLE_S = 2.0
"""Seconds without a notification after which the connection is checked."""
RETRY_S, RETRY_S_MAX = 0.5, 30.0
"""Seconds until the next connection: they double with each one that fails."""
ERROR_CHARACTERS_MAX = 200


@dataclass(frozen=True)
class Topic:
    """A line of deltas, whose notifications go by the names of its model and line."""

    model: str
    line: int

    @property
    def redis_key(self) -> str:
        return f"embedserve:deltas:{self.model}:{self.line}"

    @property
    def nats_subject(self) -> str:
        """A dot ends a token of a subject, and names of models may have some."""
        return f"embedserve.deltas.{self.model.replace('.', '/')}.{self.line}"


class BrokerConnection(Protocol):
    """A connection to a broker, for one event loop. Every method raises if the broker fails."""

    async def connect(self) -> None: ...

    async def publish(self, topic: Topic, seq: int) -> None:
        """Adds the seq of a delta that was published."""

    async def subscribe(self, topics: Sequence[Topic]) -> None: ...

    async def receive(self) -> set[Topic]:
        """Returns topics that may have new deltas; empty after IDLE_S, if the broker responds.

        It may be late, but a notification that comes between two calls is not missed.
        """

    async def close(self) -> None: ...


def open_broker(url: BrokerUrl) -> BrokerConnection:
    """Returns a connection that is not open yet. Imports the broker's client."""
    if url.kind == "redis":
        from embedserve_store.deltas.notify.redis_broker import RedisBroker

        return RedisBroker(url)
    from embedserve_store.deltas.notify.nats_broker import NatsBroker

    return NatsBroker(url)


def described_error(error: BaseException, url: BrokerUrl | None) -> str:
    """Returns the broker and an error in one line, without the password."""
    text = " ".join(str(error).split())
    if url is None:  # the URL could not be read
        return text
    if url.password:
        text = text.replace(url.password, "***")
    text = "".join(one if one.isprintable() else "?" for one in text)
    return f"{url}: {type(error).__name__}: {text}"[:ERROR_CHARACTERS_MAX].removesuffix(": ")
