"""Tests that the code has each message that the page quotes."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from documents import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = ("server/embedserve", "model_store/embedserve_store")
ANYTHING = "…"


def quoted() -> list[str]:
    """Returns the messages in the first column of the page's tables."""
    rows = re.findall(r"^\| (.+?) \| .*\|$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


@cache
def source_texts() -> tuple[str, ...]:
    """Returns every text in the sources, with … in place of each formatted value."""
    paths = [path for folder in SOURCES for path in Path(ROOT, folder).rglob("*.py")]
    return tuple(text for path in paths for text in _texts(ast.parse(path.read_text("utf-8"))))


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yields the texts of a module, without docstrings."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if node in docstrings:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[\d.]*[a-z]", ANYTHING, node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else ANYTHING
                for part in node.values
            )


def pattern(message: str) -> re.Pattern[str]:
    pieces = (piece.strip() for piece in message.split(ANYTHING))
    return re.compile(".*".join(re.escape(piece) for piece in pieces if piece), re.DOTALL)


def test_troubleshooting_page_quotes_messages() -> None:
    assert len(quoted()) > 40


@pytest.mark.parametrize("message", quoted())
def test_quoted_messages_exist_in_the_code(message: str) -> None:
    wanted = pattern(message)
    assert any(wanted.search(text) for text in source_texts())
