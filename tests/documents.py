"""Functions that extract prose, links and code from the Markdown files of the repository."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_OURS = {"store", "dist", "build", "results"}
"""Folders that git ignores, apart from hidden ones."""


def markdown_files() -> list[Path]:
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name[0] != "." and name not in NOT_OURS]
        found += [Path(folder, name) for name in files if name.endswith(".md")]
    return sorted(found)


def prose(path: Path) -> str:
    """Returns the document without code: no fenced or indented blocks, and no text in backticks."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^( {4}|\t).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def links(path: Path) -> list[str]:
    """Returns the targets of the document's links, except links to the web."""
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(path))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(path: Path) -> set[str]:
    """Returns the anchors that GitHub generates for the document's headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@dataclass(frozen=True)
class Block:
    """A fenced code block: its location, language and text."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text("utf-8")
    for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(path, line, found[1], found[2])
