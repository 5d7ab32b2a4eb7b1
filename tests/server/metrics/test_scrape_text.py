"""Tests of scrapes: concurrent scrapes share one rendering, and no scrape gets values from before
it."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import pytest
from hyperframe.frame import SettingsFrame
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from server.fake_engine import FakeEngine
from server.live import make_pipeline
from server.waiting import until
from server.wire.http2.peer import Peer, body_of, update

from embedserve.api.management import management_app
from embedserve.metrics import scrape_text
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.scrape_text import ScrapeText
from embedserve.wire.grpc.service import GrpcService
from embedserve.wire.http_stream import Headers
from embedserve.wire.route_table import RouteTable

SCRAPES = 100
WINDOW = 1 << 30
"""Bytes of the window, larger than all responses together."""
SCRAPE: Headers = [
    (b":method", b"GET"),
    (b":scheme", b"http"),
    (b":path", b"/metrics"),
    (b":authority", b"h"),
]


class Renderings(Collector):
    """Gauges that count how often they were collected.

    Attributes:
        families: number of gauges.
    """

    def __init__(self) -> None:
        self.count = 0
        self.families = 1
        self.has_failed = False

    def collect(self) -> Iterator[Metric]:
        self.count += 1
        if self.has_failed:
            raise RuntimeError("no values")
        for _ in range(self.families):
            yield GaugeMetricFamily("renderings", "Count.", value=self.count)


@pytest.fixture
def renderings() -> Renderings:
    return Renderings()


@pytest.fixture
def text(renderings: Renderings) -> ScrapeText:
    registry = CollectorRegistry()
    registry.register(renderings)
    return ScrapeText(registry)


async def test_scrapes_received_before_a_rendering_share_its_text(
    renderings: Renderings, text: ScrapeText
) -> None:
    received_s = [perf_counter() for _ in range(SCRAPES)]
    assert len({await text.render(one) for one in reversed(received_s)}) == 1
    assert renderings.count == 1


async def test_event_loop_runs_while_a_text_is_rendered(
    renderings: Renderings, text: ScrapeText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks also that scrapes received during a rendering share the next one."""
    monkeypatch.setattr(scrape_text, "TURN_S", -1.0)  # one family in an iteration
    renderings.families = 100
    first = asyncio.create_task(text.render(perf_counter()))
    for _ in range(renderings.families // 2):
        await asyncio.sleep(0)
    assert not first.done()
    later = [asyncio.create_task(text.render(perf_counter())) for _ in range(SCRAPES)]
    assert (await first).count(b" 1.0") == renderings.families
    texts = await asyncio.gather(*later)
    assert {one.count(b" 2.0") for one in texts} == {renderings.families}
    assert renderings.count == 2


async def test_cancelled_rendering_leaves_no_text(
    renderings: Renderings, text: ScrapeText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape_text, "TURN_S", -1.0)
    received_s = perf_counter()
    cancelled = asyncio.create_task(text.render(received_s))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert b" 2.0" in await text.render(received_s)
    assert renderings.count == 2


async def test_later_scrape_gets_newer_values(text: ScrapeText) -> None:
    for count in range(1, 4):
        assert f"renderings {count}.0" in (await text.render(perf_counter())).decode()


async def test_scrape_retried_after_a_failed_rendering_gets_new_values(
    renderings: Renderings, text: ScrapeText
) -> None:
    await text.render(perf_counter())
    received_s = perf_counter()
    renderings.has_failed = True
    with pytest.raises(RuntimeError):
        await text.render(received_s)
    renderings.has_failed = False
    assert "renderings 3.0" in (await text.render(received_s)).decode()


async def test_burst_of_scrapes_costs_one_rendering(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks also that a later scrape counts the requests before it."""
    rendered: list[Metrics] = []
    collect = Metrics.collect

    def count(metrics: Metrics) -> Iterator[Metric]:
        rendered.append(metrics)
        return collect(metrics)

    pipeline = make_pipeline(FakeEngine(), executor=executor)
    routes = RouteTable(pipeline, management_app(pipeline), GrpcService(pipeline))
    monkeypatch.setattr(Metrics, "collect", count)
    peer = Peer(routes.resolve_http2, settings={SettingsFrame.INITIAL_WINDOW_SIZE: WINDOW})
    peer.send(update(0, WINDOW))

    async def scrape(streams: range) -> bytes:
        """Returns the body of the last response, once all scrapes have one."""
        peer.send(*(peer.headers(stream, SCRAPE) for stream in streams))

        def are_answered() -> bool:
            peer.take()
            return not peer.connection.streams

        await until(are_answered)
        return body_of(peer.seen, streams[-1])

    sent = b'embedserve_response_bytes_total{protocol="rest"} '
    assert sent + b"0.0" in await scrape(range(1, 2 * SCRAPES, 2))
    assert len(rendered) == 1
    pipeline.metrics.protocols["rest"].count_answered(0.02, 100)
    assert sent + b"100.0" in await scrape(range(2 * SCRAPES + 1, 2 * SCRAPES + 2))
    assert len(rendered) == 2
