"""Tests of the console in Chromium with fake engines: errors, tokens and rollouts."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from browser import Page
from e2e.console_page import (
    HAS_FORM,
    IS_LIVE,
    NO_DRAIN_S,
    console_server,
    focused,
    page,
    reset_page,
    tab_to,
)
from server.fake_engine import FakeEngine
from server.fake_models import info_of, model_info
from server.fake_parts import FakeParts
from server.live import make_pipeline, serving

from embedserve.access.grants import hash_of
from embedserve.batching.batcher import Batcher
from embedserve.config import Limits
from embedserve.model_info import ModelInfo
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.table_spec import TableSpec

__all__ = ["page", "reset_page"]


def test_picture_of_a_page_is_drawn(page: Page, tmp_path: Path) -> None:
    """Guards ``Page.picture``, which draws docs/console.png."""
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


async def test_error_is_marked_at_the_feature_that_it_names_alone(
    page: Page, tmp_path: Path
) -> None:
    engine = FakeEngine(model_info("shop", {"user": (7, 4), "user.age": (7, 4)}))
    async with console_server(engine, tmp_path) as live:
        await asyncio.to_thread(send_an_invalid_age, page, live.http_port)


def send_an_invalid_age(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(HAS_FORM)
    page.value("document.querySelector('#ids-1').value = '99'")
    page.value("document.querySelector('#ask-form').requestSubmit()")
    page.until("document.querySelector('[aria-invalid]')")
    assert page.text("#ask-error").startswith("INVALID_ARGUMENT: features.user.age[0][0] is 99")
    assert page.value("[...document.querySelectorAll('[aria-invalid]')].map((one) => one.id)") == [
        "ids-1"
    ]


CITIES = ("New York", "San Jose", "Rome")
NICKNAMES = {
    "t_city": {
        "New York": "Big Apple",
        "Atlantis": "Lost City",
        "San Jose": "The Valley",
        "Rome": "Eternal City",
    }
}


async def test_nearest_labels_are_shown_for_an_unpooled_model(page: Page, tmp_path: Path) -> None:
    rule = IdRule("map", id_type="string")  # an unknown id is rejected
    table = TableSpec("t_city", 3, 4, ("city",), "none", "float32", ids=rule)
    engine = FakeEngine(info_of("trips", [table], {"t_city": CITIES}))
    engine.tables["t_city"][:] = [[1, 0, 0, 0], [3, 4, 0, 0], [0, 1, 0, 0]]
    async with console_server(engine, tmp_path, names=NICKNAMES) as live:
        await asyncio.to_thread(add_a_city_by_name, page, live.http_port)


def add_a_city_by_name(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(HAS_FORM)
    page.value("document.querySelector('#ids-0').value = 'New York, San Jose'")
    tab_to(page, "label-0")
    page.write("Eternal City")
    page.press("Enter")
    page.until("document.querySelector('#label-0').value === ''")
    assert page.value("document.querySelector('#ids-0').value") == "New York, San Jose, Rome"
    page.until("document.querySelector('.nearest')")
    assert "Nearest to Big Apple, by cosine" in page.text("#response")
    near = page.value("[...document.querySelectorAll('.nearest li')].map((one) => one.innerText)")
    assert [" ".join(one.split()) for one in near] == ["The Valley 0.60", "Eternal City 0.00"]
    rejected = [one for one in page.errors if "status of 400" in one]
    assert (len(rejected), page.errors) == (1, rejected)  # Atlantis is not in the vocabulary


MANY_LABELS = {"t_item": {str(row): "" for row in range(130_000)}}
"""More labels than a JavaScript function takes as arguments; a labels file may have 600,000."""


async def test_many_labels_are_listed_once_for_a_table(page: Page, tmp_path: Path) -> None:
    table = TableSpec("t_item", 7, 4, ("item", "last"), "sum", "float32")
    engine = FakeEngine(info_of("shop", [table], {}))
    async with console_server(engine, tmp_path, names=MANY_LABELS) as live:
        await asyncio.to_thread(page.open, f"http://127.0.0.1:{live.http_port}/console")
        await asyncio.to_thread(page.until, IS_LIVE)
    count = "document.querySelectorAll('datalist option').length"
    assert await asyncio.to_thread(page.value, count) == len(MANY_LABELS["t_item"])


async def test_parts_and_their_replicas_are_shown(page: Page, tmp_path: Path) -> None:
    parts = FakeParts(joined={("shop", 7): [2, 0, 1]})
    async with console_server(FakeEngine(replace(model_info(), shards=parts)), tmp_path) as live:
        await asyncio.to_thread(page.open, f"http://127.0.0.1:{live.http_port}/console")
        await asyncio.to_thread(page.until, "document.querySelector('#models p.error')")
        text = page.text("#models p").replace("\u00a0", " ")
        assert text == "shop 7: replicas of part 0: 2, part 1: 0, part 2: 1; part 1 is lost"
        parts.joined["shop", 7][1] = 1
        await asyncio.to_thread(page.until, "document.querySelector('#models p.hint')")


async def test_token_is_requested_and_kept_in_the_tab(page: Page, tmp_path: Path) -> None:
    lines = [
        {"name": "both", "sha256": hash_of(b"es_both"), "roles": ["admin", "embed"]},
        {"name": "caller", "sha256": hash_of(b"es_call"), "roles": ["embed"]},
        {"name": "admin", "sha256": hash_of(b"es_admin"), "roles": ["admin"]},
    ]
    async with console_server(FakeEngine(), tmp_path, *lines) as live:
        await asyncio.to_thread(enter_tokens, page, live.http_port)


def enter_tokens(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until("!document.querySelector('#access').hidden")
    page.until("document.querySelector('#state.paused')")  # no token was rejected yet
    assert "UNAUTHENTICATED" not in page.text("main")
    page.until("document.activeElement.id === 'token'")
    page.write("es_none\u2026")  # no header can have this character
    page.press("Enter")
    page.until("/UNAUTHENTICATED/.test(document.querySelector('#access').innerText)")
    page.until("document.querySelector('#state.bad')")
    page.value("document.querySelector('#token').focus()")
    page.write("es_call")
    page.press("Enter")
    page.until(HAS_FORM)  # this token may send requests
    page.until("/PERMISSION_DENIED/.test(document.querySelector('#state').innerText)")
    page.value("document.querySelector('#token').focus()")
    page.write("es_admin")
    page.press("Enter")
    page.until("document.querySelector('#access').hidden")
    page.value("document.querySelector('#ask-form').requestSubmit()")
    page.until("!document.querySelector('#access').hidden")  # the figures stay visible
    assert "PERMISSION_DENIED" in page.text("#access")
    assert "Figures need the role admin, lookups the role embed." in page.text("#access")
    page.value("document.querySelector('#token').focus()")
    page.write("es_both")
    page.press("Enter")
    page.until(IS_LIVE)
    page.until("document.querySelector('#access').hidden")
    assert "$TOKEN" in page.text("#curl")
    assert page.value("document.querySelector('#links').hidden")  # links carry no token
    assert "es_both" not in page.value("document.documentElement.outerHTML")
    assert page.value("[localStorage.length, document.cookie]") == [0, ""]
    page.open(f"http://127.0.0.1:{port}/console")  # reloads in the same tab
    page.until(IS_LIVE)
    page.value("sessionStorage.clear()")


BEGIN_POLL = "document.dispatchEvent(new Event('visibilitychange'))"
POLLS = """performance.getEntriesByType("resource").filter((one) => one.name.endsWith("/models"))
  .length"""


def until_polled(page: Page) -> None:
    """Waits until the page shows the results of a poll that began after this call."""
    polled = page.value(POLLS)
    page.until(f"{BEGIN_POLL} && {POLLS} > {polled + 2}")


async def test_lookup_requests_a_token_where_the_figures_need_none(
    page: Page, tmp_path: Path
) -> None:
    line = {"name": "caller", "sha256": hash_of(b"es_call"), "roles": ["embed"]}
    async with console_server(FakeEngine(), tmp_path, line, management_host="127.0.0.1") as live:
        await asyncio.to_thread(look_up_with_a_token, page, live.management_port)


def look_up_with_a_token(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(HAS_FORM)
    page.until(IS_LIVE)
    assert page.value("document.querySelector('#access').hidden")
    page.value("document.querySelector('#ids-0').focus()")
    page.write("1, 2")
    page.press("Enter")
    page.until("document.activeElement.id === 'token'")
    until_polled(page)
    assert focused(page) == "token"
    page.write("es_call")
    page.press("Enter")
    page.until("document.querySelector('#access').hidden")
    assert "$TOKEN" in page.text("#curl")
    assert page.text("#ask-error") == ""  # that of the lookup without a token
    page.value("document.querySelector('#ask-form').requestSubmit()")
    page.until("document.querySelector('.vector')")  # for the ids typed before
    until_polled(page)
    assert page.value("document.querySelector('#access').hidden")
    page.value("sessionStorage.clear()")


async def test_form_is_updated_when_its_model_switches_version(page: Page) -> None:
    stable = FakeEngine(replace(model_info(), served_name="shop@stable"))
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(stable, FakeEngine(model_info("books")), executor=executor)

        def switch(name: str, info: ModelInfo) -> None:
            manifest = replace(info.manifest, version=8)
            engine = FakeEngine(replace(info, manifest=manifest, served_name=name))
            metrics = pipeline.metrics.models[name]
            metrics.switch(engine.model, 0)
            batcher = Batcher(engine, engine.model, Limits(), metrics, executor)
            pipeline.models.activate(name, batcher)

        async with serving(pipeline, NO_DRAIN_S) as live:
            await asyncio.to_thread(type_before_a_switch, page, live.http_port)
            tables = [
                TableSpec("t_shelf", 5, 4, ("shelf",), "none", "float32"),
                TableSpec("t_user", 9, 4, ("user",), "none", "float32"),
            ]
            switch("shop@stable", info_of("shop", tables, {}))
            await asyncio.to_thread(look_up_after_a_switch, page)
            switch("books", model_info("books", {"user": (12, 4)}))
            await asyncio.to_thread(check_the_newest_version, page)


def type_before_a_switch(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(HAS_FORM)
    assert page.text("#ask-model option:checked") == "shop 7 (stable)"
    assert page.text("#hint-0") == "rows 0 to 6 of table t_user"
    page.value("document.querySelector('#ids-0').focus()")
    page.write("1, 2")


def look_up_after_a_switch(page: Page) -> None:
    page.until(f"{BEGIN_POLL} && /shelf/.test(document.querySelector('#ask-features').innerText)")
    assert page.text("#ask-model option:checked") == "shop 8 (stable)"
    assert page.text("#hint-1") == "rows 0 to 8 of table t_user"
    assert "weights" not in page.text("#ask-features")
    assert page.value("document.querySelector('#ids-1').value") == "1, 2"
    assert focused(page) == "ids-1"  # the field of the same feature
    page.value("document.querySelector('#ask-form').requestSubmit()")
    page.until("/^Answered by shop version 8/.test(document.querySelector('#answered').innerText)")
    select = "document.querySelector('#ask-model')"
    page.value(f"{select}.value = 'books@7', {select}.dispatchEvent(new Event('change'))")
    page.until("document.querySelector('#weights-0')")
    assert page.value("document.querySelector('#ids-0').value") == ""  # ids of another model
    page.value("document.querySelector('#weights-0').value = '0.5, 2'")
    page.value("document.querySelector('#ids-0').focus()")
    page.write("1, 2")


def check_the_newest_version(page: Page) -> None:
    page.until(f"{BEGIN_POLL} && document.querySelector('#hint-0').innerText.includes('11')")
    assert page.value("document.querySelector('#ask-model').value") == "books@8"
    assert "/models/books@8/embed" in page.text("#curl")
    assert focused(page) == "ids-0"
    page.write(", 3")
    assert page.value("document.querySelector('#ids-0').value") == "1, 2, 3"
    assert page.value("document.querySelector('#weights-0').value") == "0.5, 2"
    assert page.value("document.querySelector('details').open")  # the request is visible
    assert page.errors == []


async def test_server_and_plans_are_described_anew_after_a_restart(page: Page) -> None:
    engine = FakeEngine()
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(engine, executor=executor)
        async with serving(pipeline, NO_DRAIN_S) as live:
            await asyncio.to_thread(page.open, f"http://127.0.0.1:{live.http_port}/console")
            await asyncio.to_thread(page.until, "document.querySelector('#server').innerText")
            assert "1 worker," in page.text("#server")
            assert "over 1 cpu rank" in page.text("#plan")
            pipeline.metrics.workers = 2
            plan = replace(engine.model.plan, world_size=2)
            engine = FakeEngine(replace(engine.model, plan=plan))
            metrics = pipeline.metrics.models["shop"]
            batcher = Batcher(engine, engine.model, Limits(), metrics, executor)
            pipeline.models.activate("shop", batcher)
            await asyncio.to_thread(until_polled, page)
    assert "2 workers," in page.text("#server")
    assert "over 2 cpu ranks" in page.text("#plan")


async def test_stopped_server_is_reported_and_hidden_page_does_not_poll(
    page: Page, tmp_path: Path
) -> None:
    async with console_server(FakeEngine(), tmp_path) as live:
        page.open("about:blank")
        await asyncio.to_thread(hide_and_show, page, live.http_port)
    await asyncio.to_thread(page.until, "document.querySelector('#state.bad')")
    status_text = page.text("#state")
    assert re.search(r"cannot be reached; the figures are of \d\d:\d\d:\d\d", status_text), (
        status_text
    )


def hide_and_show(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(IS_LIVE)
    hide = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
    event = "document.dispatchEvent(new Event('visibilitychange'))"
    page.value(hide.format("true") + event)
    page.until("document.querySelector('#state').innerText === 'Paused while nobody looks'")
    page.value("new Promise((done) => setTimeout(done, 2500))")  # exceeds the poll interval
    page.requests.clear()
    page.value("new Promise((done) => setTimeout(done, 2500))")
    assert page.requests == []
    # An hour later, with requests that nobody saw.
    page.value("{ const began = Date.now(); performance.now = () => Date.now() - began + 3.6e6; }")
    page.value("Promise.all(Array.from({ length: 99 }, () => fetch('embed', { method: 'POST' })))")
    page.value(hide.format("false") + event)
    page.until(IS_LIVE)
    until_polled(page)
    assert page.text(".tile .value") == "0/s"
    assert any(url.endswith("/metrics") for url in page.requests)
