"""Tests of the console in Chromium with names that have markup or are long."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Page
from e2e.console_page import HAS_FORM, IS_LIVE, MARKUP, console_server, page, reset_page
from server.fake_engine import FakeEngine
from server.fake_models import info_of, model_info

from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.table_spec import TableSpec

__all__ = ["page", "reset_page"]
TITLE = "embedserve console"


def hostile_engine() -> FakeEngine:
    """Returns an engine whose features, strings and model have names that no store would accept."""
    as_map = IdRule("map", id_type="string", unknown="skip")
    tables = [
        TableSpec("t_tag", 3, 4, (MARKUP,), "sum", "float32", ids=as_map),
        TableSpec(
            "t_user", 3, 4, ("\u202euser'</script>",), "sum", "float32", ids=IdRule(unknown="skip")
        ),
    ]
    return FakeEngine(info_of("shop", tables, {"t_tag": (MARKUP, "b", "c")}))


async def test_names_are_never_rendered_as_markup(page: Page, tmp_path: Path) -> None:
    async with console_server(hostile_engine(), tmp_path) as live:
        live.pipeline.telemetry = RequestTelemetry(slow_ms=1e-6)
        await asyncio.to_thread(check_hostile_names, page, live.http_port)


def check_hostile_names(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(HAS_FORM)
    for field, ids in (("#ids-0", f"{MARKUP}, nobody's"), ("#ids-1", "1, 9007199254740993, 7")):
        page.value(f"document.querySelector('{field}').value = {json.dumps(ids)}")
    page.value("document.querySelector('#ask-form').requestSubmit()")
    page.until("document.querySelector('.nearest')")
    page.until("document.querySelectorAll('#unknown tbody tr').length === 2")
    assert MARKUP in page.text("#unknown")
    assert MARKUP in page.text("#ask-features")
    assert f"Nearest to </option><b>1, {MARKUP}, 7" in page.text("#response")
    assert "[[1, 9007199254740993, 7]]" in page.text("#curl")  # all digits are kept
    page.until("document.querySelector('#slow tbody tr')")
    assert "shop 7" in page.text("#slow")
    assert "nobody'\\''s" in page.text("#curl")
    assert "\\u202euser'\\''" in page.text("#curl")  # raw, it would reverse what follows
    assert f"1 of {MARKUP}" in page.text("#response")
    assert page.value("document.querySelectorAll('img, b:not(.shard b)').length") == 0
    assert page.value("document.title") == TITLE
    assert page.errors == []


WIDE_CARDS = """[...document.querySelectorAll(".card")]
  .filter((one) => one.scrollWidth > one.clientWidth)"""
SPLIT_CLOCKS = """[...document.querySelectorAll("time")].filter((one) => {
  const clock = new Range();
  clock.setStart(one.firstChild, "2026-11-29 ".length);
  clock.setEnd(one.firstChild, one.firstChild.length);
  return clock.getClientRects().length > 1;
})"""
SPLIT_NEWEST = """[...document.querySelectorAll("#models td:nth-child(3)")].filter((one) => {
  const words = new Range();
  words.selectNodeContents(one);
  return one.innerText === "newest" && words.getClientRects().length > 1;
})"""


@pytest.mark.parametrize("alias", ["", "@" + "s" * 64])
async def test_table_of_long_names_stays_in_its_card(
    page: Page, tmp_path: Path, alias: str
) -> None:
    name = "m" * 150
    engine = FakeEngine(replace(model_info(name), served_name=name + alias))
    async with console_server(engine, tmp_path) as live:
        await asyncio.to_thread(check_widths, page, live.http_port)


def check_widths(page: Page, port: int) -> None:
    page.open(f"http://127.0.0.1:{port}/console")
    page.until(IS_LIVE)
    try:
        for width in (360, 641, 1089, 1280):
            page.be(width, 900)
            assert page.value("document.documentElement.scrollWidth") <= width
            assert page.value(f"{WIDE_CARDS}.length") == 0
            assert page.value(f"{SPLIT_CLOCKS}.length") == 0
            assert page.value(f"{SPLIT_NEWEST}.length") == 0
    finally:
        page.be(1280, 900)
