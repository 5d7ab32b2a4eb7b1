"""Server of some ports of a process, which owns their connections from accept to drain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import random
import socket
from collections import Counter
from collections.abc import Sequence
from functools import partial
from time import perf_counter

from embedserve.config import Limits
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.pipeline import RequestPipeline
from embedserve.wire.allowed_hosts import AllowedHosts
from embedserve.wire.asgi import ASGIApp
from embedserve.wire.connections import Connection, ProtocolDetector
from embedserve.wire.grpc.service import GrpcService
from embedserve.wire.http1.fast_path import FastPathConnection
from embedserve.wire.http2.protocol import Http2Protocol
from embedserve.wire.http2.upload_budget import UploadBudget
from embedserve.wire.listener import BACKLOG, Listener
from embedserve.wire.response_date import ResponseDate
from embedserve.wire.route_table import RouteTable
from embedserve.wire.tls.certificates import Certificates
from embedserve.wire.tls.handshake import Handshake, Handshakes

logger = logging.getLogger(__name__)

ACCEPTS_MAX = 16
"""Connections accepted on a port in an event-loop iteration: about a millisecond of work."""
CHECK_S = 1.0
"""Seconds between two checks of the connections' time and memory limits. The Date header of
responses has whole seconds, and is refreshed as often."""
CHECK_TURN_S = 0.002
"""Seconds of an event-loop iteration for the time limits. A stream takes some 0.5 us, and there may
be 200,000 within --connection-bytes-max."""
VANISHED_S_MAX = 120
"""Seconds without a packet from a client's host, after which its connection ends, such as one whose
open streams have nothing to send."""
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, VANISHED_S_MAX // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, VANISHED_S_MAX // 8),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_S_MAX * 1000),
)
"""Options of a port, which its connections inherit."""
AGE_JITTER = (0.9, 1.1)
"""Range of the random factor of connection_age_s_max, so that retirements are spread in time."""
CHECK_BYTES = 64 << 20
"""Bytes by which connections may grow before their memory is checked ahead of CHECK_S."""
CUT_SHOWN = 5
"""Client addresses in the log of aborted connections, those with the most connections first."""
UPLOAD_BYTES_MAX = 256 << 20
"""Bytes of request bodies in flight beyond the stream windows; at least one body of the largest
size always fits."""


class WireServer:
    """Server of the connections of some ports, of all protocols, over one request pipeline.

    Attributes:
        date: Date header of the connections' responses, refreshed every CHECK_S.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        management: ASGIApp,
        certificates: Certificates | None = None,
        service: GrpcService | None = None,
        limits: Limits | None = None,
        allowed_hosts: AllowedHosts | None = None,
    ) -> None:
        """
        Args:
            pipeline: request pipeline.
            management: ASGI application for all requests except embed requests.
            certificates: TLS certificates; None: connections are plaintext.
            service: gRPC service; None: all gRPC methods.
            limits: limits on connections; None: the limits of ``pipeline``.
            allowed_hosts: allowed Host names, not checked on Unix sockets; None: any.
        """
        self.date = ResponseDate()
        self._pipeline = pipeline
        self._limits = limits or pipeline.limits
        self._certificates = certificates
        self._handshakes = Handshakes(logger, pipeline.metrics.tls)
        if certificates is not None:
            pipeline.metrics.tls.expires_s = lambda: certificates.expires_s
        service = service or GrpcService(pipeline)
        # Keyed by is_local: cached routes and templates depend on the allowed Host names.
        self._route_tables = {
            is_local: RouteTable(pipeline, management, service, names)
            for is_local, names in ((False, allowed_hosts), (True, None))
        }
        upload_bytes = max(UPLOAD_BYTES_MAX, pipeline.limits.body_bytes_max)
        self._uploads = UploadBudget(
            upload_bytes, lambda: not pipeline.models.has_full_unsized_queue
        )
        pipeline.on_queue_reopened(self._uploads.retry)
        pipeline.on_large_response(self.record_growth)
        self._grown_bytes = 0  # since the last memory check
        self._log = RateLimitedLogger(logger)
        self._connections: dict[Connection, float] = {}  # to perf_counter time of retirement
        pipeline.metrics.connections.open_counts.append(lambda: len(self._connections))
        self._listening: list[Listener] = []
        self._checking: asyncio.Handle | None = None
        self._emptied = asyncio.Event()  # set when the last connection ends
        self._is_draining = False

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Accepts connections of any protocol on all ``sockets``, which are bound.

        Unix sockets are listening already, and never use TLS. Workers share them, while each worker
        has a queue of its own for a port.
        """
        for sock in sockets:
            is_unix = sock.family == socket.AF_UNIX
            if not is_unix:
                for option in KEEPALIVE:
                    sock.setsockopt(*option)
                sock.listen(BACKLOG)
            make_connection = partial(self._new_connection, is_local=is_unix)
            listener = Listener(sock, make_connection, 1 if is_unix else ACCEPTS_MAX)
            listener.start()
            self._listening.append(listener)
        self._check()

    async def drain(self, drain_s: float) -> None:
        """Stops listening, answers accepted requests, and closes all connections in ``drain_s``."""
        self._is_draining = True
        while self._listening:
            await self._listening.pop().close(waiting_max=BACKLOG)
        for connection in list(self._connections):
            connection.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                # Again, because a connection whose TLS handshake ends is replaced by another.
                while self._connections:
                    self._emptied.clear()
                    await self._emptied.wait()
        if self._connections:
            logger.warning(
                "%d connections are cut: they did not end in time", len(self._connections)
            )
        for connection in list(self._connections):
            connection.abort()
        if self._checking is not None:
            self._checking.cancel()

    def _new_connection(self, is_local: bool) -> asyncio.Protocol:
        """Creates the protocol of an accepted connection; a Unix socket has no TLS."""
        if self._certificates is None or is_local:
            return ProtocolDetector(self, is_local=is_local)
        return Handshake(self, self._handshakes, self._certificates.context)

    def http1(self, is_local: bool) -> FastPathConnection:
        return FastPathConnection(self._route_tables[is_local], self)

    def http2(self, is_local: bool) -> Http2Protocol:
        return Http2Protocol(self._route_tables[is_local], self._uploads, self)

    def add(self, connection: Connection) -> None:
        self._connections[connection] = self._retire_s()
        if self._is_draining:
            asyncio.get_running_loop().call_soon(connection.drain)

    def discard(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        if not self._connections:
            self._emptied.set()

    def _check(self) -> None:
        self.date.refresh()
        self._abort_largest()
        self._warn_if_no_descriptors()
        self._check_times(list(self._connections))

    def _check_times(self, connections: list[Connection]) -> None:
        """Checks the times of ``connections``, and starts the timer of the next check. What takes
        longer than CHECK_TURN_S is left to the next event-loop iterations."""
        now_s = perf_counter()
        end_s = now_s + CHECK_TURN_S
        try:
            while connections and now_s < end_s:
                connection = connections.pop()
                if connection in self._connections:
                    connection.check_time(now_s)
                if now_s > self._connections.get(connection, math.inf):
                    self._connections[connection] = math.inf
                    connection.retire()
                now_s = perf_counter()
        finally:
            loop = asyncio.get_running_loop()
            if connections:
                self._checking = loop.call_soon(self._check_times, connections)
            else:
                self._checking = loop.call_later(CHECK_S, self._check)

    def _retire_s(self) -> float:
        """Returns the perf_counter time to retire a connection accepted now, with random jitter."""
        age_s = self._limits.connection_age_s_max
        return perf_counter() + age_s * random.uniform(*AGE_JITTER) if age_s else math.inf

    def has_room(self) -> bool:
        """Returns whether another connection is allowed. Counts and logs a rejected one."""
        limit = self._limits.connections_max
        if len(self._connections) < limit:
            return True
        self._pipeline.metrics.connections.refused += 1
        self._log.log(
            logging.WARNING, "new connections are closed", f"there are connections_max, {limit}"
        )
        return False

    def record_growth(self, nbytes: int) -> None:
        """Records that connections hold ``nbytes`` more; small amounts need not be reported."""
        self._grown_bytes += nbytes
        if self._grown_bytes > CHECK_BYTES:
            # Not deferred: one event-loop iteration may read megabytes from each connection.
            self._abort_largest()

    def _warn_if_no_descriptors(self) -> None:
        """Logs when file descriptors run out: accept then fails, and connections wait."""
        try:
            os.close(os.dup(0))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._log.log(
                    logging.ERROR,
                    "new connections wait",
                    f"{error.strerror} ({len(self._connections)} are open); raise `ulimit -n` or "
                    "lower --connections-max",
                )

    def _abort_largest(self) -> None:
        """Aborts the connections that hold most memory, until the total is within the limit.

        Cached headers are dropped first, as idle connections of ordinary clients hold them, too.
        """
        self._grown_bytes = 0
        limit = self._limits.connection_bytes_max
        held = [(one.held_bytes, one.unsent_memory(), one) for one in self._connections]
        sizes: dict[int, int] = {}  # of batches kept by unsent responses, which may share them
        users: Counter[int] = Counter()
        for _, unsent, _ in held:
            if unsent:
                sizes.update(unsent)
                users.update(unsent.keys())
        total = sum(nbytes for nbytes, _, _ in held) + sum(sizes.values())
        if total <= limit:
            return
        if self._drop_cached_headers():
            self._abort_largest()
            return
        held.sort(key=lambda one: one[0] + sum(one[1].values()))
        cut: Counter[str] = Counter()  # by address
        while total > limit:
            nbytes, unsent, connection = held.pop()
            connection.abort()
            self.discard(connection)  # before its connection_lost is called
            users.subtract(unsent.keys())
            total -= nbytes + sum(sizes[owner] for owner in unsent if not users[owner])
            cut[connection.peer] += 1
        most = ", ".join(peer for peer, _ in cut.most_common(CUT_SHOWN))
        self._log.log(
            logging.WARNING,
            "connections are closed",
            f"{cut.total()}, because all together held more than --connection-bytes-max ({limit})",
            fields=lambda: {"address": most},
        )

    def _drop_cached_headers(self) -> bool:
        """Drops the headers that connections have cached. Returns whether there were any."""
        caching = [one for one in self._connections if isinstance(one, Http2Protocol)]
        return sum(one.drop_cached_headers() for one in caching) > 0
