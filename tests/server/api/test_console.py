"""Tests of the console: its files and security headers, permissions, and the labels of ids."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import httpx
import pytest
from server.api.clients import client_of
from server.fake_engine import FakeEngine
from server.live import make_pipeline

from embedserve.access.authenticator import Authenticator
from embedserve.access.grants import hash_of
from embedserve.api.console import routes
from embedserve.api.console.labels import LABELS_BYTES_MAX, read_labels
from embedserve.api.management import management_app

FOLDER = Path(routes.__file__).parent / "page"
NAMES = sorted(path.name for path in FOLDER.iterdir())
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|Function\("
)
TEXTS, BACKGROUNDS = ("text", "quiet", "accent", "bad", "below"), ("page", "card")
CONTRAST_MIN = 4.5
"""Minimum contrast of text, WCAG 2.1, 1.4.3."""


@pytest.mark.parametrize("name", ["", *NAMES])
async def test_page_files_are_served_unchanged_with_security_headers(
    rest: httpx.AsyncClient, name: str
) -> None:
    response = await rest.get(f"/console/{name}".rstrip("/"))
    assert response.status_code == 200
    assert response.content == (FOLDER / (name or "index.html")).read_bytes()
    suffix = Path(name or "index.html").suffix
    assert response.headers["content-type"] == routes.MEDIA_TYPES[suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(
        one.split(" ", 1) for one in response.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert {policy[kind] for kind in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}


@pytest.mark.parametrize("name", ["nothing.js", "%2e%2e/routes.py", "..%2froutes.py", "page/a.js"])
async def test_files_outside_the_page_folder_are_not_served(
    rest: httpx.AsyncClient, name: str
) -> None:
    response = await rest.get(f"/console/{name}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize("name", NAMES)
def test_page_files_name_no_other_host_and_create_no_markup_from_text(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[\w-]+\.\w", text)
    assert not MARKUP.search(text)
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
        for linked in re.findall(r'\s(?:src|href)="([^"#]+)"', text):
            assert linked in ("docs", "metrics") or linked.removeprefix("console/") in NAMES


@pytest.mark.parametrize("is_dark", [False, True])
def test_text_contrast_meets_wcag(is_dark: bool) -> None:
    text = (FOLDER / "console.css").read_text("utf-8")
    light, dark = (
        dict(re.findall(r"--(\w[\w-]*): (#\w{6})", block))
        for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    )
    colors = light | dark if is_dark else light
    pairs = [*product(TEXTS, BACKGROUNDS), ("text", "block"), ("bad", "bad-ground")]
    for one, other in [*pairs, ("on-accent", "accent")]:
        lighter, darker = sorted((luminance(colors[one]), luminance(colors[other])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= CONTRAST_MIN, (one, other)


def luminance(color: str) -> float:
    """Returns WCAG's relative luminance of #RRGGBB."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


async def test_console_routes_require_their_roles(
    engine: FakeEngine, executor: ThreadPoolExecutor, tmp_path: Path
) -> None:
    roles = {"es_boss": "admin", "es_right": "embed"}
    lines = [
        {"name": token, "sha256": hash_of(token.encode()), "roles": [role]}
        for token, role in roles.items()
    ]
    (tmp_path / "tokens").write_text("\n".join(map(json.dumps, lines)))
    access = Authenticator(str(tmp_path / "tokens"))
    app = management_app(make_pipeline(engine, executor=executor, authenticator=access))
    expected_statuses = {
        "/console": (200, 200, 200),
        "/console/console.js": (200, 200, 200),
        "/models/shop/plan": (401, 200, 200),
        "/console/labels/shop": (401, 403, 200),
        "/console/nothing": (401, 403, 404),
    }
    async with client_of(app) as client:
        for path, statuses in expected_statuses.items():
            for token, status in zip(("", "es_right", "es_boss"), statuses, strict=True):
                headers = {"authorization": f"Bearer {token}"} if token else {}
                response = await client.get(path, headers=headers)
                assert (path, token, response.status_code) == (path, token, status)


async def test_labels_of_served_models_are_returned(
    engine: FakeEngine, executor: ThreadPoolExecutor, tmp_path: Path
) -> None:
    path = tmp_path / "labels.json"
    labels = {"t_movie": {"7": "Amélie", "9223372036854775807": "<b>last</b>"}}
    path.write_text(json.dumps({"shop": labels, "other": {}}))
    app = management_app(make_pipeline(engine, executor=executor), labels=read_labels(str(path)))
    async with client_of(app) as client:
        for name in ("shop", "shop@7"):
            assert (await client.get(f"/console/labels/{name}")).json() == {"tables": labels}
        assert (await client.get("/console/labels/other")).status_code == 404


async def test_labels_are_empty_if_not_configured(rest: httpx.AsyncClient) -> None:
    assert (await rest.get("/console/labels/shop")).json() == {"tables": {}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\xff", "not JSON"),
        ("[]", "expected an object, not list"),
        ('{"shop": 1}', "'shop': expected an object, not int"),
        ('{"shop": {"user": ["a"]}}', "'shop': 'user': expected an object, not list"),
        ('{"shop": {"user": {"7": 7}}}', "'shop': 'user': '7' is 7: not a string"),
        ('{"shop": {"user": {"7": "\\ud800"}}}', "not text"),
        (" " * (LABELS_BYTES_MAX + 1), f"over {LABELS_BYTES_MAX} bytes"),
    ],
)
def test_invalid_labels_file_is_rejected_with_the_reason(
    text: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "labels.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(str(path))) as raised:
        read_labels(str(path))
    assert reason in str(raised.value)
