"""Routes of the console: its static files, which need no authentication, and the labels of ids.

The page requests all other data from the other routes, with the permissions of its user. Its files
load nothing from other hosts, and a policy forbids browsers to run or load anything else in the
page.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from embedserve.api.console.labels import NO_LABELS, Labels
from embedserve.api.dependencies import ModelsDep

router = APIRouter()

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content-Security-Policy of the console: scripts and styles only from this server's files, none
inline, and no text is parsed as markup."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
PATH, INDEX = "/console", "index.html"
_FOLDER = files(__package__) / "page"
_FILES = {one.name: one.read_bytes() for one in _FOLDER.iterdir()}
PAGE_PATHS = frozenset({PATH} | {f"{PATH}/{name}" for name in _FILES})
"""Paths that need no authentication, since the files hold no secrets; the page itself prompts for a
token."""


class ModelLabels(BaseModel):
    """Human-readable labels of a model's ids."""

    tables: dict[str, dict[str, str]] = Field(
        description="By table, the label of each id; empty where the server was given none."
    )


def _file(name: str) -> Response:
    return Response(_FILES[name], 200, HEADERS, MEDIA_TYPES[PurePath(name).suffix])


@router.get(PATH, include_in_schema=False)
async def page() -> Response:
    return _file(INDEX)


@router.get(PATH + "/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    if name not in _FILES:
        raise HTTPException(404, "Not Found")
    return _file(name)


@router.get(
    PATH + "/labels/{model}",
    summary="Get the labels of a model's ids",
    tags=["console"],
    response_model=ModelLabels,
)
async def labels_of(model: str, models: ModelsDep, request: Request) -> Response:
    """Returns the labels of a served model's ids, as given by `serve --labels`."""
    labels: Labels = request.app.state.labels
    encoded = labels.get(models.model(model).name, NO_LABELS)
    return Response(encoded, media_type="application/json")
