"""Tests of the console in Chromium: keyboard use, hostile names, tokens, and a stopped server."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import Page, browsing
from e2e.demo_server import Demo
from server.fake_engine import FakeEngine
from server.fake_models import info_of, model_info
from server.fake_parts import FakeParts
from server.live import Live, make_pipeline, serving

from embedserve.access.authenticator import Authenticator
from embedserve.access.grants import hash_of
from embedserve.batching.batcher import Batcher
from embedserve.config import Limits
from embedserve.model_info import ModelInfo
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve_client import EmbedClient
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.table_spec import TableSpec

MARKUP = '<img src=x onerror="document.title=1">'
"""A name with markup: if a page ever rendered it, the script would change the page's title."""
HOSTILE_NAMES = {"t_user": {"9007199254740993": MARKUP, "1": "</option><b>1", "2": MARKUP + "2"}}
TITLE = "embedserve console"
FORM_IS_THERE = "document.querySelector('#ask-features .feature')"
IS_LIVE = "document.querySelector('#state.good')"
WIDTHS = (360, 390, 800, 1280)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("chromium")) as page:
        page.be(1280, 900)
        yield page


@pytest.fixture(autouse=True)
def forget(page: Page) -> None:
    page.open("about:blank")
    page.requests.clear()
    page.errors.clear()


def focused(page: Page) -> str:
    name: str = page.value("document.activeElement.id || document.activeElement.className")
    return name


def tab_to(page: Page, wanted: str) -> None:
    """Presses Tab until the element with this id or class has the focus, which must be visible."""
    for _ in range(60):
        page.press("Tab")
        shown = page.value("getComputedStyle(document.activeElement).outlineStyle")
        assert shown != "none", focused(page)
        if focused(page) == wanted:
            return
    raise AssertionError(f"{wanted} has no way by Tab")


def test_the_curl_line_works_as_it_stands_and_is_copied(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until(FORM_IS_THERE)
    line = page.text("#curl")
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60, check=True)
    assert "error" not in json.loads(done.stdout), done.stdout
    page.value("document.querySelector('#curl-copy').click()")
    page.until("document.querySelector('#copied').innerText !== ''")


def test_the_demo_is_asked_by_keys_alone(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until(FORM_IS_THERE)
    tab_to(page, "skip")
    page.press("Enter")
    tab_to(page, "ids-0")
    page.write("111161 468569, 109830")
    tab_to(page, "label-1")
    page.write("Inception")
    page.press("Enter")
    page.until("document.querySelector('#ids-1').value === '1375666'")
    tab_to(page, "ids-2")
    page.write("Action, Sci-Fi")
    page.press("Enter")
    # The response covers all three features: each Enter submits the form.
    page.until("document.querySelectorAll('.vector').length === 3")
    page.until("document.querySelectorAll('.nearest').length === 2")
    with EmbedClient(demo.server.http) as client:
        right = client.embed(
            {
                "history": [[111161, 468569, 109830]],
                "candidate": [[1375666]],
                "candidate_genres": [["Action", "Sci-Fi"]],
            }
        )
    shown = page.value("[...document.querySelectorAll('.numbers')].map((one) => one.textContent)")
    values = [[float(value) for value in one.split(", ")] for one in shown]
    keys = ("history", "candidate", "candidate_genres")
    assert values == [pytest.approx(right[key][0].tolist(), rel=1e-6) for key in keys]
    near = page.text(".vector:nth-of-type(2) .nearest")
    assert "The Matrix" in near
    assert "Inception" not in near
    assert "Nearest to The Shawshank Redemption, The Dark Knight, Forrest Gump" in page.text(
        "#answer"
    )
    assert "Zeros, of empty bags: user" in page.text("#answer")
    assert '\'{"features": {"history": [[111161, 468569, 109830]]' in page.text("#curl")
    page.until(IS_LIVE)
    assert "rows 15,623" in page.text("#plan")
    assert page.errors == []
    assert all(url.startswith(demo.server.http) for url in page.requests)


def test_what_is_refused_is_said_at_its_field(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until(FORM_IS_THERE)
    tab_to(page, "ids-2")
    page.write("Sci")
    page.press("Enter")
    page.until("document.querySelector('#ask-error').textContent")
    assert "'Sci': not one of the 28 ids" in page.text("#ask-error")
    assert page.value("[...document.querySelectorAll('[aria-invalid]')].map((one) => one.id)") == [
        "ids-2"
    ]
    assert focused(page) == "ids-2"


def test_figures_are_those_of_the_requests(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until("document.querySelector('#tiles .value')")
    with EmbedClient(demo.server.http) as client:
        for _ in range(40):
            client.embed({"user": [[37287, 7]] * 5})
    page.until("/^5 ?examples/.test(document.querySelector('.tile:nth-child(4) .value').innerText)")
    page.until("document.querySelector('.tile .value').innerText !== '0/s'")
    assert "user" in page.text("#unknown")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_width_scrolls_sideways(page: Page, demo: Demo, scheme: str) -> None:
    page.open(f"{demo.server.http}/console")
    page.until("document.querySelector('#tiles .value')")
    page.value("document.querySelector('#ids-1').value = '1375666'")
    page.value("document.querySelector('#ask-form').requestSubmit()")
    page.until("document.querySelector('.nearest')")
    grounds = set()
    try:
        for width in WIDTHS:
            page.be(width, 800, scheme)
            assert page.value("document.documentElement.scrollWidth") <= width
            grounds.add(page.value("getComputedStyle(document.body).backgroundColor"))
    finally:
        page.be(1280, 900)
    assert grounds == {"rgb(16, 21, 27)" if scheme == "dark" else "rgb(245, 246, 248)"}


PLACES = """['#ask-form', '#figures', '#models'].map((one) => {
  const { left, top } = document.querySelector(one).getBoundingClientRect();
  return { left, top };
})"""


def test_a_narrow_page_begins_with_the_form(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until(FORM_IS_THERE)
    page.until("document.querySelector('#tiles .value')")
    try:
        page.be(390, 844)
        ask, figures, models = page.value(PLACES)
        assert ask["top"] < figures["top"] < models["top"]
        page.be(1280, 900)
        ask, figures, models = page.value(PLACES)
        assert figures["top"] < models["top"]
        assert figures["top"] < ask["top"]
        assert models["left"] < ask["left"]
    finally:
        page.be(1280, 900)


def test_the_header_links_to_the_api_and_the_metrics(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until("!document.querySelector('#links').hidden")
    links = page.value("[...document.querySelectorAll('#links a')].map((one) => one.href)")
    assert links == [f"{demo.server.http}/docs", f"{demo.server.http}/metrics"]
    for link in links:
        assert httpx.get(link).status_code == 200


READ = """
import('/console/metrics.js').then(({ Between, Reading }) => {
  const text = (ok, low, high, all) => `# HELP h of {x="y"} 1
n_total{model="a",outcome="O\\\\"K, }\\\\n\\\\\\\\"} ${ok}
n_total{model="b",outcome="NO"} 7
h_bucket{le="0.1"} ${low}
h_bucket{le="0.2"} ${high}
h_bucket{le="+Inf"} ${all}
h_sum ${all * 2}
h_count ${all}
`;
  const first = new Reading(text(10, 0, 0, 0), 0);
  const between = new Between(first, new Reading(text(30, 10, 20, 20), 4000));
  const anew = new Between(first, new Reading(text(4, 0, 0, 0), 1000));
  return {
    rates: [...between.rates("n_total", "outcome")],
    quantiles: [0.25, 0.5, 0.99].map((share) => between.quantile("h", share)),
    mean: between.mean("h"),
    nothing: [anew.mean("h"), anew.quantile("h", 0.5), anew.quantile("x", 0.5)],
    anew: anew.rate("n_total", { model: "a" }),
  };
})
"""


def test_rates_and_quantiles_of_two_readings(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    read = page.value(READ)
    assert read["rates"] == [['O"K, }\n\\', 5], ["NO", 0]]
    assert read["quantiles"] == pytest.approx([0.05, 0.1, 0.198])
    assert read["mean"] == 2
    assert read["nothing"] == [None, None, None]
    assert read["anew"] == 4  # a counter that was reset


def hostile_engine() -> FakeEngine:
    """Returns an engine whose features, strings and model have names that no store would accept."""
    as_map = IdRule("map", id_type="string", unknown="skip")
    tables = [
        TableSpec("t_tag", 3, 4, (MARKUP,), "sum", "float32", ids=as_map),
        TableSpec(
            "t_user", 3, 4, ("user'</script>",), "sum", "float32", ids=IdRule(unknown="skip")
        ),
    ]
    return FakeEngine(info_of("shop", tables, {"t_tag": (MARKUP, "b", "c")}))


@asynccontextmanager
async def served(
    engine: FakeEngine,
    folder: Path,
    *lines: dict[str, Any],
    management_host: str = "",
    names: Mapping[str, Mapping[str, str]] = HOSTILE_NAMES,
) -> AsyncIterator[Live]:
    """Serves ``engine`` with ``names`` as labels, and with the tokens of ``lines``, if any."""
    labels, tokens = folder / "labels.json", folder / "tokens"
    labels.write_text(json.dumps({engine.model.name: names}))
    tokens.write_text("\n".join(map(json.dumps, lines)))
    with ThreadPoolExecutor(1) as executor:
        access = Authenticator(str(tokens)) if lines else None
        pipeline = make_pipeline(engine, executor=executor, authenticator=access)
        async with serving(pipeline, labels=str(labels), management_host=management_host) as live:
            yield live


async def test_names_are_never_markup(page: Page, tmp_path: Path) -> None:
    async with served(hostile_engine(), tmp_path) as live:
        live.pipeline.telemetry = RequestTelemetry(slow_ms=1e-6)
        await asyncio.to_thread(look_at_hostile_names, page, live.http_port)


def look_at_hostile_names(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(FORM_IS_THERE)
    for field, ids in (("#ids-0", f"{MARKUP}, nobody's"), ("#ids-1", "1, 9007199254740993, 7")):
        page.value(f"document.querySelector('{field}').value = {json.dumps(ids)}")
    page.value("document.querySelector('#ask-form').requestSubmit()")
    page.until("document.querySelector('.nearest')")
    page.until("document.querySelectorAll('#unknown tbody tr').length === 2")
    assert MARKUP in page.text("#unknown")
    assert MARKUP in page.text("#ask-features")
    assert f"Nearest to </option><b>1, {MARKUP}, 7" in page.text("#answer")
    assert "[[1, 9007199254740993, 7]]" in page.text("#curl")  # all digits are kept
    page.until("document.querySelector('#slow tbody tr')")
    assert "shop 7" in page.text("#slow")
    assert "nobody'\\''s" in page.text("#curl")
    assert f"1 of {MARKUP}" in page.text("#answer")
    assert page.value("document.querySelectorAll('img, b:not(.shard b)').length") == 0
    assert page.value("document.title") == TITLE
    assert page.errors == []


CITIES = ("New York", "San Jose", "Rome")
NICKNAMES = {
    "t_city": {
        "New York": "Big Apple",
        "Atlantis": "Lost City",
        "San Jose": "The Valley",
        "Rome": "Eternal City",
    }
}


async def test_cities_of_an_unpooled_model_have_nearest_ones(page: Page, tmp_path: Path) -> None:
    rule = IdRule("map", id_type="string")  # an unknown id is rejected
    table = TableSpec("t_city", 3, 4, ("city",), "none", "float32", ids=rule)
    engine = FakeEngine(info_of("trips", [table], {"t_city": CITIES}))
    engine.tables["t_city"][:] = [[1, 0, 0, 0], [3, 4, 0, 0], [0, 1, 0, 0]]
    async with served(engine, tmp_path, names=NICKNAMES) as live:
        await asyncio.to_thread(add_a_city_by_name, page, live.http_port)


def add_a_city_by_name(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(FORM_IS_THERE)
    page.value("document.querySelector('#ids-0').value = 'New York, San Jose'")
    tab_to(page, "label-0")
    page.write("Eternal City")
    page.press("Enter")
    page.until("document.querySelector('#label-0').value === ''")
    assert page.value("document.querySelector('#ids-0').value") == "New York, San Jose, Rome"
    page.until("document.querySelector('.nearest')")
    assert "Nearest to Big Apple, by cosine" in page.text("#answer")
    near = page.value("[...document.querySelectorAll('.nearest li')].map((one) => one.innerText)")
    assert [" ".join(one.split()) for one in near] == ["The Valley 0.60", "Eternal City 0.00"]
    refused = [one for one in page.errors if "status of 400" in one]
    assert (len(refused), page.errors) == (1, refused)  # Atlantis is not in the vocabulary


async def test_parts_and_their_replicas_are_shown(page: Page, tmp_path: Path) -> None:
    parts = FakeParts(joined={("shop", 7): [2, 0, 1]})
    async with served(FakeEngine(replace(model_info(), shards=parts)), tmp_path) as live:
        await asyncio.to_thread(page.open, f"http://127.0.0.1:{live.http_port}/console")
        await asyncio.to_thread(page.until, "document.querySelector('#models p.error')")
        text = page.text("#models p").replace("\u00a0", " ")
        assert text == "shop 7: replicas of part 0: 2, part 1: 0, part 2: 1; part 1 is lost"
        parts.joined["shop", 7][1] = 1
        await asyncio.to_thread(page.until, "document.querySelector('#models p.hint')")


async def test_a_token_is_asked_for_and_kept_in_the_tab(page: Page, tmp_path: Path) -> None:
    lines = [
        {"name": "both", "sha256": hash_of(b"es_both"), "roles": ["admin", "embed"]},
        {"name": "caller", "sha256": hash_of(b"es_call"), "roles": ["embed"]},
        {"name": "admin", "sha256": hash_of(b"es_admin"), "roles": ["admin"]},
    ]
    async with served(FakeEngine(), tmp_path, *lines) as live:
        await asyncio.to_thread(give_tokens, page, live.http_port)


def give_tokens(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until("!document.querySelector('#access').hidden")
    page.until("document.querySelector('#state.paused')")  # no token was rejected yet
    assert "UNAUTHENTICATED" not in page.text("main")
    page.until("document.activeElement.id === 'token'")
    page.write("es_none")
    page.press("Enter")
    page.until("/UNAUTHENTICATED/.test(document.querySelector('#access').innerText)")
    page.until("document.querySelector('#state.bad')")
    page.value("document.querySelector('#token').focus()")
    page.write("es_call")
    page.press("Enter")
    page.until(FORM_IS_THERE)  # this token may send requests
    page.until("/PERMISSION_DENIED/.test(document.querySelector('#state').innerText)")
    page.value("document.querySelector('#token').focus()")
    page.write("es_admin")
    page.press("Enter")
    page.until("document.querySelector('#access').hidden")
    page.value("document.querySelector('#ask-form').requestSubmit()")
    page.until("!document.querySelector('#access').hidden")  # the figures stay visible
    assert "PERMISSION_DENIED" in page.text("#access")
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


async def test_a_lookup_asks_for_a_token_where_the_figures_need_none(
    page: Page, tmp_path: Path
) -> None:
    line = {"name": "caller", "sha256": hash_of(b"es_call"), "roles": ["embed"]}
    async with served(FakeEngine(), tmp_path, line, management_host="127.0.0.1") as live:
        await asyncio.to_thread(look_up_with_a_token, page, live.management_port)


def look_up_with_a_token(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(FORM_IS_THERE)
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
    page.value("document.querySelector('#ask-form').requestSubmit()")
    page.until("document.querySelector('.vector')")  # for the ids typed before
    until_polled(page)
    assert page.value("document.querySelector('#access').hidden")
    page.value("sessionStorage.clear()")


async def test_the_form_follows_its_model_to_another_version(page: Page) -> None:
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

        async with serving(pipeline) as live:
            await asyncio.to_thread(type_before_a_switch, page, live.http_port)
            tables = [
                TableSpec("t_shelf", 5, 4, ("shelf",), "none", "float32"),
                TableSpec("t_user", 9, 4, ("user",), "none", "float32"),
            ]
            switch("shop@stable", info_of("shop", tables, {}))
            await asyncio.to_thread(look_up_after_a_switch, page)
            switch("books", model_info("books", {"user": (12, 4)}))
            await asyncio.to_thread(see_the_newest_version, page)


def type_before_a_switch(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(FORM_IS_THERE)
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


def see_the_newest_version(page: Page) -> None:
    page.until(f"{BEGIN_POLL} && document.querySelector('#hint-0').innerText.includes('11')")
    assert page.value("document.querySelector('#ask-model').value") == "books@8"
    assert "/models/books@8/embed" in page.text("#curl")
    assert focused(page) == "ids-0"
    page.write(", 3")
    assert page.value("document.querySelector('#ids-0').value") == "1, 2, 3"
    assert page.value("document.querySelector('#weights-0').value") == "0.5, 2"
    assert page.value("document.querySelector('details').open")  # the request is visible
    assert page.errors == []


async def test_a_server_that_is_gone_and_a_page_that_nobody_sees(
    page: Page, tmp_path: Path
) -> None:
    async with served(FakeEngine(), tmp_path) as live:
        page.open("about:blank")
        await asyncio.to_thread(hide_and_show, page, live.http_port)
    await asyncio.to_thread(page.until, "document.querySelector('#state.bad')")
    said = page.text("#state")
    assert re.search(r"cannot be reached; the figures are of \d\d:\d\d:\d\d", said), said


def hide_and_show(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(IS_LIVE)
    hide = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
    event = "document.dispatchEvent(new Event('visibilitychange'))"
    page.value(hide.format("true") + event)
    page.until("document.querySelector('#state').innerText === 'Paused while nobody looks'")
    page.until("new Promise((done) => setTimeout(done, 2500, true))")  # exceeds the poll interval
    page.requests.clear()
    page.until("new Promise((done) => setTimeout(done, 2500, true))")
    assert page.requests == []
    page.value(hide.format("false") + event)
    page.until(IS_LIVE)
    assert any(url.endswith("/metrics") for url in page.requests)


NEAREST = """
import("/console/neighbours.js").then(async ({ nearest }) => {
  const { models } = await fetch("models").then((answer) => answer.json());
  const named = new Map([["1375666", "Inception"], ["133093", "The Matrix"]]);
  const ask = (seq) => nearest(Array(models[0].length_per_key[0]).fill(1), { ...models[0], seq },
    "candidate", "candidate", named, new Set(), String);
  await ask(1);
  await ask(1);
  await ask(2);
})
"""


def test_the_nearest_are_fetched_again_after_a_delta(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.value(NEAREST)
    page.value("1")  # waits for earlier events
    assert sum(url.endswith("/embed") for url in page.requests) == 2


REJECTED = """
import("/console/neighbours.js").then(async ({ nearest }) => {
  let known, asked;
  const really = globalThis.fetch;
  globalThis.fetch = async (path, options) => {
    if (!path.endsWith("/embed")) return really(path, options);  // of the page itself
    asked += 1;
    const ids = JSON.parse(options.body).features.f.map(([id]) => id);
    const at = ids.findIndex((id) => id > known);
    const field = `features.f[${at}][0]`;
    const error = { code: "INVALID_ARGUMENT", message: "no such id", field };
    if (at >= 0) return new Response(JSON.stringify({ error }), { status: 400 });
    return new Response(JSON.stringify({ values: ids.map((id) => [id, 1]) }));
  };
  const named = new Map(Array.from({ length: 20 }, (_, at) => [String(at + 1), ""]));
  const ask = async (seq, key, last) => {
    [known, asked] = [last, 0];
    const answer = { model: "m", version: 1, seq };
    const found = await nearest([1, 1], answer, "f", key, named, new Set(), String)
      .catch((error) => [{ id: error.message }]);
    return [found.map(({ id }) => id).join(" "), asked];
  };
  const answers = [await ask(1, "f", 3), await ask(1, "f", 3)];
  for (const key of ["f", "g", "f"]) answers.push(await ask(2, key, 18));
  return answers;
})
"""


def test_a_rejected_id_is_asked_for_again_after_a_delta_alone(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    refused, still, found, other, again = page.value(REJECTED)
    assert refused == ["INVALID_ARGUMENT: no such id", 17]  # gives up after 16 of 20 ids
    assert still == ["INVALID_ARGUMENT: no such id", 0]
    assert found == other == ["1 2 3 4 5 6", 3]
    assert again == ["1 2 3 4 5 6", 1]


VERSIONS = """
Promise.all([import('/console/metrics.js'), import('/console/models.js')]).then(
  ([{ Between, Reading }, { showModels }]) => {
    const line = (alias, version, outcome, count) => `embedserve_model_requests_total` +
      `{model="m",alias="${alias}",version="${version}",outcome="${outcome}"} ${count}\\n`;
    const bucket = (alias, version, le, count) => `embedserve_model_request_seconds_bucket` +
      `{model="m",alias="${alias}",version="${version}",le="${le}"} ${count}\\n`;
    const text = (times) => line("stable", 3, "OK", 90 * times)
      + line("stable", 3, "CANCELLED", times)
      + line("canary", 4, "OK", 6 * times) + line("canary", 4, "INTERNAL", 2 * times)
      + bucket("canary", 4, "0.1", 8 * times) + bucket("canary", 4, "+Inf", 8 * times);
    const between = new Between(new Reading(text(0), 0), new Reading(text(2), 2000));
    const other = { model: "m", since: "", leaving: [], next: null };
    const models = [["stable", 3], ["canary", 4]];
    showModels(models.map(([alias, version]) => ({ alias, version, ...other })), "m", between);
    return [...document.querySelectorAll("#models tbody tr")].map((row) => row.innerText);
  })
"""


def test_requests_and_failures_are_shown_by_version(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    stable, canary = (" ".join(row.split()) for row in page.value(VERSIONS))
    assert "stable when asked 91 0 % " in stable
    assert "canary when asked 8 25 % 99 ms" in canary
    assert ("(default)" in stable, "(default)" in canary) == (True, False)  # default: the first


DELTAS = """
import('/console/models.js').then(({ showModels }) => {
  const other = { model: "m", alias: "", since: "", leaving: [], next: null };
  const follows = { seq: 1234567, wanted_seq: 1234567, state: "following", reason: "" };
  const stalls = { seq: 12, wanted_seq: 14, state: "stalled", reason: "delta 13 is missing" };
  const holds = { seq: 12, wanted_seq: 14, state: "held", reason: "" };
  const stays = { seq: 1200, wanted_seq: 1200, state: "following", reason: "", at_seq: 1200 };
  const each = [undefined, follows, stalls, holds, stays];
  const models = each.map((deltas, version) => ({ ...other, version, deltas }));
  showModels(models, "m", null);
  return [...document.querySelectorAll("#models p")].map((one) => [one.className, one.innerText]);
})
"""


def test_versions_that_follow_deltas_say_how_far_they_are(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    assert page.value(DELTAS) == [
        ["hint", "m 1: delta 1,234,567, following"],
        ["error", "m 2: delta 12 of 14, stalled: delta 13 is missing"],
        ["hint", "m 3: delta 12 of 14, held"],
        ["hint", "m 4: delta 1,200, following up to 1,200"],
    ]


PARTS = """
import('/console/models.js').then(({ showModels }) => {
  const shards = [{ part: 0, replicas: 2, why: "" }, { part: 1, replicas: 1, why: "" }];
  const router = { model: "m", alias: "", since: "", leaving: [], next: null, shards };
  const each = [[], ["day", "genre"]];
  const models = each.map((local_tables, at) => ({ ...router, version: at + 1, local_tables }));
  showModels(models, "m", null);
  return [...document.querySelectorAll("#models p")].map((one) => one.innerText);
})
"""


def test_a_router_shows_its_parts_and_small_tables(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    replicas = "replicas of part\u00a00: 2, part\u00a01: 1"
    assert page.value(PARTS) == [
        f"m 1: {replicas}",
        f"m 2: {replicas}; looked up by the router itself: day, genre",
    ]


MISSING = """
import('/console/answer.js').then(async ({ showAnswer }) => {
  const tables = [{ name: "t", features: ["user"] }, { name: "s", features: ["item"] }];
  const model = { features: ["user", "item"], tables };
  const answer = { keys: ["user", "item"], length_per_key: [2, 2], values: [[0, 0, 0, 0]] };
  await showAnswer({ ...answer, missing_ids: { user: 3 } }, model, [], new Map());
  return [...document.querySelectorAll("#answer p")].map((one) => one.innerText);
})
"""


def test_an_answer_without_a_lost_part_says_so(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    assert page.value(MISSING) == [
        "Ids of lost parts, whose rows the vectors lack: 3 of user",
        "Zeros, of empty bags: item",
    ]


COUNTED = """
Promise.all([import('/console/metrics.js'), import('/console/traffic.js')]).then(
  ([{ Between, Reading }, { showLookups }]) => {
    const of = (kind, one) => `{model="m",alias="",version="1",${kind}="${one}"}`;
    const line = (kind, one, ids) => `embedserve_${kind}_lookups_total${of(kind, one)} ${ids}
embedserve_${kind}_read_bytes_total${of(kind, one)} ${ids * 64}
`;
    const text = (times) => ["table", "rank"]
      .map((kind) => line(kind, "0", 24 * times) + line(kind, "1", 8 * times)).join("");
    const between = new Between(new Reading(text(0), 0), new Reading(text(2), 1000));
    showLookups([{ model: "m", alias: "", version: 1 }], between);
    return document.querySelector("#lookups-section").innerText;
  })
"""


def test_lookups_are_shown_with_how_uneven_they_are(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    lookups = " ".join(page.value(COUNTED).split())
    assert "rows/s read share 0 48 3 KiB/s 75 % 1 16 1 KiB/s 25 %" in lookups
    assert "rank 0 48 3 KiB/s 75 % rank 1 16 1 KiB/s 25 %" in lookups
    assert "busiest rank is asked 1.50 times as much as the mean" in lookups


@pytest.mark.parametrize(("path", "shown"), [("/docs", ".opblock"), ("/redoc", "[data-item-id]")])
def test_the_openapi_pages_are_drawn_without_other_hosts(
    page: Page, demo: Demo, path: str, shown: str
) -> None:
    page.open(demo.server.http + path)
    page.until(f"document.querySelectorAll({json.dumps(shown)}).length > 20")
    blocked = [one for one in page.errors if "Content Security Policy" in one]
    assert page.errors == blocked
    assert all("cdn.redoc.ly" in one for one in blocked), blocked
