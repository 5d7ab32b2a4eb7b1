"""Tests of the console in Chromium with the demo: keyboard use, widths, links and figures."""

import json
import shlex
import subprocess

import httpx
import pytest
from browser import Page
from e2e.console_page import HAS_FORM, IS_LIVE, focused, page, reset_page, tab_to
from e2e.demo_server import Demo

from embedserve_client import EmbedClient

__all__ = ["page", "reset_page"]

WIDTHS = (360, 390, 800, 1280)


def test_curl_command_runs_as_shown_and_is_copied(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until(HAS_FORM)
    line = page.text("#curl")
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60, check=True)
    assert "error" not in json.loads(done.stdout), done.stdout
    page.value("document.querySelector('#curl-copy').click()")
    page.until("document.querySelector('#copied').innerText !== ''")


def test_lookup_form_works_with_the_keyboard_alone(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until(HAS_FORM)
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
        expected = client.embed(
            {
                "history": [[111161, 468569, 109830]],
                "candidate": [[1375666]],
                "candidate_genres": [["Action", "Sci-Fi"]],
            }
        )
    shown = page.value("[...document.querySelectorAll('.numbers')].map((one) => one.textContent)")
    values = [[float(value) for value in one.split(", ")] for one in shown]
    keys = ("history", "candidate", "candidate_genres")
    assert values == [pytest.approx(expected[key][0].tolist(), rel=1e-6) for key in keys]
    near = page.text(".vector:nth-of-type(2) .nearest")
    assert "The Matrix" in near
    assert "Inception" not in near
    assert "Nearest to The Shawshank Redemption, The Dark Knight, Forrest Gump" in page.text(
        "#response"
    )
    assert "Zeros, of empty bags: user" in page.text("#response")
    assert '\'{"features": {"history": [[111161, 468569, 109830]]' in page.text("#curl")
    page.until(IS_LIVE)
    assert "rows 15,623" in page.text("#plan")
    assert page.errors == []
    assert all(url.startswith(demo.server.http) for url in page.requests)


def test_rejection_is_shown_at_the_invalid_field(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until(HAS_FORM)
    tab_to(page, "ids-2")
    page.write("Sci")
    page.press("Enter")
    page.until("document.querySelector('#ask-error').textContent")
    assert "'Sci': not one of the 28 ids" in page.text("#ask-error")
    assert page.value("[...document.querySelectorAll('[aria-invalid]')].map((one) => one.id)") == [
        "ids-2"
    ]
    assert focused(page) == "ids-2"


def test_figures_reflect_the_requests(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until("document.querySelector('#tiles .value')")
    with EmbedClient(demo.server.http) as client:
        for _ in range(40):
            client.embed({"user": [[37287, 7]] * 5})
    page.until("/^5 ?examples/.test(document.querySelector('.tile:nth-child(4) .value').innerText)")
    page.until("document.querySelector('.tile .value').innerText !== '0/s'")
    assert "user" in page.text("#unknown")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_never_scrolls_sideways_at_any_width(page: Page, demo: Demo, scheme: str) -> None:
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


POSITIONS = """['#ask-form', '#figures', '#models'].map((one) => {
  const { left, top } = document.querySelector(one).getBoundingClientRect();
  return { left, top };
})"""


def test_narrow_page_begins_with_the_form(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until(HAS_FORM)
    page.until("document.querySelector('#tiles .value')")
    try:
        page.be(390, 844)
        form, figures, models = page.value(POSITIONS)
        assert form["top"] < figures["top"] < models["top"]
        page.be(1280, 900)
        form, figures, models = page.value(POSITIONS)
        assert figures["top"] < models["top"]
        assert figures["top"] < form["top"]
        assert models["left"] < form["left"]
    finally:
        page.be(1280, 900)


def test_header_links_to_the_api_docs_and_metrics(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.until("!document.querySelector('#links').hidden")
    links = page.value("[...document.querySelectorAll('#links a')].map((one) => one.href)")
    assert links == [f"{demo.server.http}/docs", f"{demo.server.http}/metrics"]
    for link in links:
        assert httpx.get(link).status_code == 200


@pytest.mark.parametrize(("path", "shown"), [("/docs", ".opblock"), ("/redoc", "[data-item-id]")])
def test_openapi_pages_are_rendered_without_other_hosts(
    page: Page, demo: Demo, path: str, shown: str
) -> None:
    page.open(demo.server.http + path)
    page.until(f"document.querySelectorAll({json.dumps(shown)}).length > 20")
    blocked = [one for one in page.errors if "Content Security Policy" in one]
    assert page.errors == blocked
    assert all("cdn.redoc.ly" in one for one in blocked), blocked
