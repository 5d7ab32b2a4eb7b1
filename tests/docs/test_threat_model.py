"""Tests that every test that docs/threat-model.md names exists."""

import re

import pytest
from documents import ROOT

NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "threat-model.md").read_text())


def test_threat_model_names_tests() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_tests_named_by_the_page_exist(path: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
