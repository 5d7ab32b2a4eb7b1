"""Fixtures and helpers of the console's tests: a page in Chromium, and a server of fake engines."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import Page, browsing
from server.fake_engine import FakeEngine
from server.live import Live, make_pipeline, serving

from embedserve.access.authenticator import Authenticator

MARKUP = '<img src=x onerror="document.title=1">'
"""A name with markup: if a page ever rendered it, the script would change the page's title."""
HOSTILE_NAMES = {"t_user": {"9007199254740993": MARKUP, "1": "</option><b>1", "2": MARKUP + "2"}}
HAS_FORM = "document.querySelector('#ask-features .feature')"
IS_LIVE = "document.querySelector('#state.good')"
NO_DRAIN_S = 0.0
"""Drain of a server behind Chromium, which keeps idle connections open until a drain cuts them."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("chromium")) as page:
        page.be(1280, 900)
        yield page


@pytest.fixture(autouse=True)
def reset_page(page: Page) -> None:
    page.open("about:blank")
    page.requests.clear()
    page.errors.clear()


def focused(page: Page) -> str:
    name: str = page.value("document.activeElement.id || document.activeElement.className")
    return name


def tab_to(page: Page, target: str) -> None:
    """Presses Tab until the element with this id or class has the focus, which must be visible."""
    for _ in range(60):
        page.press("Tab")
        shown = page.value("getComputedStyle(document.activeElement).outlineStyle")
        assert shown != "none", focused(page)
        if focused(page) == target:
            return
    raise AssertionError(f"{target} has no way by Tab")


@asynccontextmanager
async def console_server(
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
        async with serving(
            pipeline, NO_DRAIN_S, labels=str(labels), management_host=management_host
        ) as live:
            yield live
