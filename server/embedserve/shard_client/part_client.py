"""The replicas of one part of the tables, and lookups that survive the loss of some of them.

docs/architecture.md describes the rules. Everything runs in callbacks of the event loop, with one
timer for all lookups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import random

from embedserve.call_trace import CallTrace
from embedserve.metrics.shard_metrics import PartStats
from embedserve.model_names import VersionKey
from embedserve.shard_client.client_stream import OnReply
from embedserve.shard_client.part_call import PartCall
from embedserve.shard_client.recent_latency import RecentLatency
from embedserve.shard_client.replica import Connect, ListedVersion, PartReplica
from embedserve.shard_client.shard_connection import Address, shown
from embedserve.shard_client.share_budget import ShareBudget
from embedserve.shard_client.timer_queue import TimerQueue

logger = logging.getLogger(__name__)

RETRY_SHARE = 0.1
"""Retries allowed per lookup, beyond a burst."""
RENEW_S_MAX = 10.0
"""Seconds after which replicas that have not accepted the present credentials are logged."""
REASONS_MAX = 4
"""Replicas named in the message of a lookup that no replica can answer."""


@dataclass(frozen=True)
class PartOptions:
    """Options of the lookups of every part.

    Attributes:
        call_timeout_s: seconds that one call may take; then another replica is called.
        hedge_share: hedges allowed per lookup, beyond a burst; 0: none.
        join_level: level at which joins are logged.
    """

    call_timeout_s: float = 0.5
    hedge_share: float = 0.1
    join_level: int = logging.INFO


class PartClient:
    """Client of one part.

    Attributes:
        part: number of the part.
        stats: counts since the start.
        hedges, retries: budgets of extra calls.
        timers: deadlines of calls in flight.
    """

    def __init__(
        self,
        part: int,
        part_count: int,
        connect: Connect,
        options: PartOptions,
        timers: TimerQueue,
    ) -> None:
        """
        Args:
            connect: makes a connection.
            timers: deadlines of calls, also of other parts.
        """
        self.part, self.part_count = part, part_count
        self.options = options
        self.stats = PartStats()
        self.recent = RecentLatency()
        self.hedges = ShareBudget(self.options.hedge_share)
        self.retries = ShareBudget(RETRY_SHARE)
        self.timers, self.clock = timers, timers.clock
        self._connect = connect
        self._addresses: dict[Address, None] = {}
        self._replicas: dict[Address, PartReplica] = {}
        self._successors: dict[Address, PartReplica] = {}  # that have not listed their models yet
        self._expected: dict[VersionKey, ListedVersion] = {}
        self._joined: dict[VersionKey, list[PartReplica]] = {}

    def __str__(self) -> str:
        return f"part {self.part} of {self.part_count}"

    # Replicas

    def set_addresses(self, addresses: Iterable[Address]) -> None:
        """Sets the addresses of the replicas. Connections of those that stay are kept; the others
        are closed after their calls, the last ones that serve a version once a new one does."""
        self._addresses = dict.fromkeys(addresses)
        for address in self._addresses:
            if address not in self._replicas:
                self._replicas[address] = self._new_replica(address)
        self._close_gone()

    def _close_gone(self) -> None:
        """Closes replicas whose address is gone. If all addresses change at once, some stay until
        another replica has joined for each of their versions."""
        for address, replica in [*self._replicas.items()]:
            if address in self._addresses or (self._addresses and self._is_needed(replica)):
                continue
            if self._replicas.pop(address, None) is None:
                continue  # closed as another one left
            replica.close("its address is gone")
            if (successor := self._successors.pop(address, None)) is not None:
                successor.close("its address is gone")

    def _is_needed(self, replica: PartReplica) -> bool:
        """Returns whether a version has ``replica``, but none whose address is there."""
        return any(
            replica in joined and not any(one.address in self._addresses for one in joined)
            for joined in self._joined.values()
        )

    def renew(self) -> None:
        """Connects to all replicas again, with the present credentials. A present connection
        remains in use until the replica has listed its models on the new one."""
        for address in self._replicas:
            if (earlier := self._successors.get(address)) is not None:
                earlier.close("the credentials have changed again")
            self._successors[address] = self._new_replica(address)
        successors = list(self._successors.values())
        self.timers.call_later(RENEW_S_MAX, partial(self._log_unrenewed, successors))

    def _new_replica(self, address: Address) -> PartReplica:
        return PartReplica(address, self._connect, self.timers.call_later, self._on_listed)

    def _on_listed(self, replica: PartReplica) -> None:
        """Lets a replica take the place of the one before, and join or leave for each version."""
        address = replica.address
        before = None
        if self._successors.get(address) is replica:
            del self._successors[address]
            before, self._replicas[address] = self._replicas[address], replica
        self._update(replica)
        if before is not None:
            before.close("its connection was replaced")
        self._close_gone()

    def _log_unrenewed(self, successors: Sequence[PartReplica]) -> None:
        """Logs which of ``successors`` have not taken the place of the ones before."""
        for replica in successors:
            if self._successors.get(replica.address) is replica:
                logger.warning(
                    "%s: %s has not accepted the new credentials yet, connections keep the "
                    "earlier ones: %s",
                    self,
                    shown(replica.address),
                    replica.reason,
                )

    def expect(self, key: VersionKey, fingerprint: str) -> None:
        """Lets replicas join for a version: those that list it with this fingerprint and part."""
        self._expected[key] = ListedVersion(fingerprint, self.part, self.part_count)
        for replica in self._replicas.values():
            self._update(replica)
        self._count(key)

    def forget(self, key: VersionKey) -> None:
        """Ends the use of a version; lookups in flight continue."""
        self._expected.pop(key, None)
        self._joined.pop(key, None)
        self.stats.replicas.pop(key, None)
        self._close_gone()

    def reasons(self, key: VersionKey) -> dict[Address, str]:
        """Returns why replicas have not joined for a version, by address."""
        expected = self._expected.get(key)
        if expected is None:
            return dict.fromkeys(self._replicas, f"{key} is not expected")
        found = {
            address: replica.mismatch(key, expected) for address, replica in self._replicas.items()
        }
        return {address: reason for address, reason in found.items() if reason}

    def why_unavailable(self, key: VersionKey) -> str:
        """Returns why no replica can answer for a version."""
        reasons = [f"{shown(address)} {why}" for address, why in self.reasons(key).items()]
        if len(reasons) > REASONS_MAX:
            reasons[REASONS_MAX:] = [f"{len(reasons) - REASONS_MAX} more"]
        return f"{self} has no replica of {key}: {'; '.join(reasons) or 'no address is known'}"

    def close(self) -> None:
        """Closes the connections after their calls. Nobody needs to hear that replicas leave."""
        self._joined.clear()
        self.set_addresses(())

    def _update(self, replica: PartReplica) -> None:
        """Lets a replica join or leave, for each expected version."""
        is_known = self._replicas.get(replica.address) is replica
        for key, expected in self._expected.items():
            joined = self._joined.setdefault(key, [])
            reason = replica.mismatch(key, expected)
            if reason and replica in joined:
                joined.remove(replica)
                level = logging.WARNING if is_known else logging.INFO
                logger.log(level, "%s: %s left %s: %s", self, shown(replica.address), key, reason)
            elif not reason and replica not in joined:
                joined.append(replica)
                level = self.options.join_level
                logger.log(level, "%s: %s joined for %s", self, shown(replica.address), key)
            self._count(key)

    def _count(self, key: VersionKey) -> None:
        self.stats.replicas[key] = len(self._joined.get(key, ()))

    def choose(
        self, key: VersionKey, tried: Sequence[PartReplica] = (), *, is_optional: bool = False
    ) -> PartReplica | None:
        """Returns a joined replica: of two random ones that with fewer calls in flight.

        Args:
            key: the version.
            tried: replicas that are left out.
            is_optional: whether to return None rather than a hung replica.
        """
        joined = self._joined.get(key)
        if not joined:
            return None
        if not tried:
            replica = _less_busy(joined)
            if not replica.is_hung:
                return replica
        others = [replica for replica in joined if replica not in tried]
        healthy = [replica for replica in others if not replica.is_hung]
        if not healthy and is_optional:
            return None
        candidates = healthy or others
        return _less_busy(candidates) if candidates else None

    # Lookups

    def look_up(
        self,
        key: VersionKey,
        message: Sequence[bytes],
        deadline_s: float,
        on_done: OnReply,
        calls: CallTrace | None = None,
    ) -> None:
        """Calls a replica, and others if it fails, is slow or hangs.

        Args:
            key: version that must answer; ``expect`` names its fingerprint.
            message: chunks of the serialized EmbedRequest.
            deadline_s: time.monotonic() at which the lookup fails with DEADLINE_EXCEEDED.
            on_done: called exactly once with the reply, and never before ``look_up`` has returned.
            calls: record of the calls for traces; None if no request is traced.
        """
        self.hedges.earn()
        self.retries.earn()
        PartCall(self, key, message, deadline_s, on_done, calls).start(self.clock())


def _less_busy(replicas: Sequence[PartReplica]) -> PartReplica:
    """Returns of two random replicas that with fewer calls in flight."""
    count = len(replicas)
    if count == 1:
        return replicas[0]
    first = int(random() * count)
    second = int(random() * (count - 1))
    if second >= first:
        second += 1
    return min(replicas[first], replicas[second], key=_in_flight)


def _in_flight(replica: PartReplica) -> int:
    return 0 if replica.connection is None else replica.connection.in_flight
