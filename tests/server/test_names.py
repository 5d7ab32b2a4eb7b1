"""Tests of class names: each is unique in the server, so that a search for a name finds one
class."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import embedserve


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in sorted(Path(embedserve.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.name}:{node.lineno}")
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
