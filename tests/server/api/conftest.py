"""Fixture of the tests of the routes: the OpenAPI document."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server.fake_engine import FakeEngine
from server.pipelines import make_pipeline

from embedserve.api.management import management_app


@pytest.fixture(scope="session")
def described() -> dict[str, Any]:
    """Returns the document of a server over a fake engine; not to be changed. Describing the routes
    takes 0.1 s."""
    with ThreadPoolExecutor(1) as executor:
        app = management_app(make_pipeline(FakeEngine(), executor=executor))
    document: dict[str, Any] = json.loads(json.dumps(app.openapi()))
    return document
