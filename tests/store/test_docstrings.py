"""Tests that the examples in docstrings return the documented results."""

import doctest
import importlib
from pathlib import Path

import pytest

import embedserve_store

FOLDER = Path(embedserve_store.__file__).parent
MODULES = [
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
    for path in sorted(FOLDER.rglob("*.py"))
    if ">>> " in path.read_text()
]


def test_docstrings_have_examples() -> None:
    assert len(MODULES) >= 5


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_are_correct(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
