"""Tests that every file and folder that docs/architecture.md names exists."""

import re

import pytest
from documents import ROOT

ROOTS = (ROOT, ROOT / "server" / "embedserve", ROOT / "model_store" / "embedserve_store")
"""Folders that the page's paths are relative to."""


def named_paths() -> list[str]:
    """Returns the texts in `…` that end like a folder or a file of this repository."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    return sorted(set(re.findall(r"`([\w/]+(?:/|\.py|\.proto|\.toml))`", text)))


def test_architecture_page_names_paths_of_every_kind() -> None:
    endings = {re.sub(r".*(?=[./])", "", path) for path in named_paths()}
    assert endings == {"/", ".py", ".toml"}


@pytest.mark.parametrize("path", named_paths())
def test_paths_named_by_the_page_exist(path: str) -> None:
    assert any((root / path).exists() for root in ROOTS)
