"""Tests of class names: each is unique in the server, so that a search for a name finds one
class. Type aliases have other names than all classes of server and store."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import embedserve
import embedserve_store


def modules(*packages: str | None) -> Iterator[tuple[str, ast.Module]]:
    for package in packages:
        assert package is not None
        for path in sorted(Path(package).parent.rglob("*.py")):
            yield path.name, ast.parse(path.read_text())


def classes(*packages: str | None) -> dict[str, list[str]]:
    """Returns where each class is defined, by its name."""
    places = defaultdict(list)
    for file, module in modules(*packages):
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file}:{node.lineno}")
    return places


def alias_of(node: ast.stmt) -> str:
    """Returns the name of the type alias that ``node`` defines; "" for anything else, and for the
    annotated parameters of commands."""
    match node:
        case ast.Assign([ast.Name(name)], ast.Subscript(ast.Name("Annotated"))):
            return ""
        case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
            is_alias = name[:1].isupper() and not name.isupper()
            return name if is_alias else ""
    return ""


def test_class_names_are_unique() -> None:
    places = classes(embedserve.__file__)
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_type_aliases_have_other_names_than_classes() -> None:
    aliases = {
        name: f"{file}:{node.lineno}"
        for file, module in modules(embedserve.__file__)
        for node in module.body
        if (name := alias_of(node))
    }
    assert len(aliases) > 40
    names = classes(embedserve.__file__, embedserve_store.__file__)
    assert {name: place for name, place in aliases.items() if name in names} == {}
