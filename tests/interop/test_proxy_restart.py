"""Tests of a server that drains and restarts behind nginx, HAProxy and Envoy, under a light load.

In the gap, requests may be rejected in the way of each protocol. Any other failure is a loss.
Before and after the gap, every response is correct.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from interop.lookups import Lookup, lookups
from interop.proxies import PROXIES, Ports, Proxy, free_ports
from running_servers import running
from server.channels import OWN_CONNECTION

from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

STEP_S_MAX = 180
PAUSE_S = 0.02
"""Seconds between a client's requests, so that the load is steady, not heavy."""
PROTOBUF = {"content-type": "application/x-protobuf"}
ANSWERED = {"200", "OK"}
RESET = "CANCELLED before an answer"
"""Outcome of a stream that HAProxy 2.6 resets after its 503; grpcio may see the reset first."""
UNAVAILABLE_OUTCOMES = {"502", "503", "UNAVAILABLE", RESET}
ANSWERS = 50
"""Number of responses that each client waits for before and after the restart."""
STREAM_REQUESTS = 5
OPTIONS = (*OWN_CONNECTION, ("grpc.max_reconnect_backoff_ms", 200))
"""Options of a channel that reconnects soon after the server is back."""
SendRequest = Callable[[Lookup], str]


class Load:
    """Clients that send one request after another, and count the outcomes."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.changed = threading.Condition()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._send_requests: list[SendRequest] = []

    def add(self, name: str, send_request: SendRequest) -> None:
        self.outcomes[name] = Counter()
        self._send_requests.append(send_request)
        self._threads.append(threading.Thread(target=self._run, args=(name, send_request)))

    def _run(self, name: str, send_request: SendRequest) -> None:
        requested = lookups(20)
        while not self._stop.wait(PAUSE_S):
            for one in requested:
                try:
                    outcome = send_request(one)
                except Exception as error:  # any error counts as a loss
                    outcome = repr(error)
                with self.changed:
                    self.outcomes[name][outcome] += 1
                    self.changed.notify_all()
                if self._stop.wait(PAUSE_S):
                    return

    def wait_for_each(self, count: int, outcomes: set[str]) -> None:
        """Waits until each client has ``count`` further outcomes of ``outcomes``."""
        with self.changed:
            expected = {
                name: seen_counts + count for name, seen_counts in self._met(outcomes).items()
            }
            is_done = self.changed.wait_for(
                lambda: all(
                    seen_counts >= expected[name]
                    for name, seen_counts in self._met(outcomes).items()
                ),
                timeout=STEP_S_MAX,
            )
        assert is_done, (outcomes, self.outcomes)

    def _met(self, outcomes: set[str]) -> dict[str, int]:
        return {
            name: sum(counts[outcome] for outcome in outcomes)
            for name, counts in self.outcomes.items()
        }

    def wait_until_answered(self) -> None:
        """Waits until each client gets a response.

        A proxy with health checks sends nothing to a server before a check has succeeded.
        """
        end = time.monotonic() + STEP_S_MAX
        for send_request in self._send_requests:
            while send_request(lookups(1)[0]) not in ANSWERED:
                assert time.monotonic() < end
                time.sleep(PAUSE_S)

    def check_answered(self) -> None:
        """Checks that no request had another outcome."""
        for name, counts in self.outcomes.items():
            assert set(counts) <= ANSWERED, (name, counts)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=STEP_S_MAX)


def rest(client: httpx.Client) -> SendRequest:
    def send_request(one: Lookup) -> str:
        response = client.post("/embed", content=one.body, headers=PROTOBUF)
        if response.status_code == 200:
            assert pb.EmbedResponse.FromString(response.content) == one.response
        return str(response.status_code)

    return send_request


def unary(stub: EmbeddingServiceStub) -> SendRequest:
    def send_request(one: Lookup) -> str:
        try:
            assert stub.Embed(one.request, timeout=STEP_S_MAX) == one.response
        except grpc.RpcError as error:
            return _code(error)
        return "OK"

    return send_request


def stream(stub: EmbeddingServiceStub) -> SendRequest:
    """Returns a function that runs a short stream, and checks all responses that it gets."""

    def send_request(one: Lookup) -> str:
        responses = stub.EmbedStream(iter([one.request] * STREAM_REQUESTS), timeout=STEP_S_MAX)
        count, outcome = 0, "OK"
        try:
            for response in responses:
                if response.HasField("error"):  # every request while models load
                    outcome = response.error.code
                else:
                    assert response == one.response
                count += 1
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED and not count:
                return RESET
            return _code(error)
        assert count == STREAM_REQUESTS
        return outcome

    return send_request


def _code(error: grpc.RpcError) -> str:
    code: str = error.code().name
    return code if code in UNAVAILABLE_OUTCOMES else f"{code}: {error.details()}"


@pytest.fixture
def ports() -> Ports:
    return free_ports()


@pytest.fixture(params=[("nginx", "haproxy"), ("envoy",)], ids=" and ".join)
def proxies(ports: Ports, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Proxy]]:
    """Runs the proxies.

    Envoy comes from the package index, without which its test is skipped, so it has its own
    parameter.
    """
    with ExitStack() as open_:
        started = []
        for name in request.param:
            (tmp_path / name).mkdir()
            started.append(open_.enter_context(PROXIES[name](tmp_path / name, ports)))
        yield started


@contextmanager
def load_through(
    *proxies: Proxy, clients: int = 1, timeout_s: float = STEP_S_MAX
) -> Iterator[Load]:
    """Yields clients for REST, unary calls and streams through each proxy, and stops them at the
    end. ``clients`` is the number of each kind."""
    load = Load()
    with ExitStack() as open_:
        for name, proxy in ((f"{one.name} {n}", one) for one in proxies for n in range(clients)):
            client = httpx.Client(base_url=proxy.http, timeout=timeout_s)
            load.add(f"{name} REST", rest(open_.enter_context(client)))
            for kind in (unary, stream):
                channel = grpc.insecure_channel(proxy.grpc, options=OPTIONS)
                stub = EmbeddingServiceStub(open_.enter_context(channel))
                load.add(f"{name} {kind.__name__}", kind(stub))
        yield load
        load.stop()


@pytest.fixture
def load(proxies: list[Proxy]) -> Iterator[Load]:
    with load_through(*proxies) as load:
        yield load


def test_server_restart_behind_proxies_loses_no_requests_outside_the_gap(
    store: Path, tmp_path: Path, ports: Ports, load: Load
) -> None:
    with running(store, tmp_path / "first", ports_used=ports) as server:
        load.wait_until_answered()
        load.start()
        load.wait_for_each(ANSWERS, ANSWERED)
        load.check_answered()
        server.process.terminate()
        assert server.process.wait(timeout=STEP_S_MAX) == 0
    load.wait_for_each(3, UNAVAILABLE_OUTCOMES)
    with running(store, tmp_path / "second", ports_used=ports):
        load.wait_for_each(20, ANSWERED)
        before = {name: seen_counts.copy() for name, seen_counts in load.outcomes.items()}
        load.wait_for_each(ANSWERS, ANSWERED)
        load.stop()
    for name, seen_counts in load.outcomes.items():
        assert set(seen_counts - before[name]) <= ANSWERED, (name, seen_counts - before[name])
        assert set(seen_counts) <= ANSWERED | UNAVAILABLE_OUTCOMES, (name, seen_counts)
