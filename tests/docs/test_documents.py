"""Tests of the pages: every link has a target, the index has every page, and the README stays
short."""

import re
from pathlib import Path

import pytest
from documents import ROOT, anchors, blocks, links, markdown_files, prose

DOCS = ROOT / "docs"
README_LINES_MAX = 150
FIRST_DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/README.md", "docs/rest.md")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_documents_are_found_and_have_links() -> None:
    found = {name_of(path): links(path) for path in markdown_files()}
    assert all(found[name] for name in FIRST_DOCUMENTS)


@pytest.mark.parametrize("path", markdown_files(), ids=name_of)
def test_links_lead_to_existing_files_and_headings(path: Path) -> None:
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("path", markdown_files(), ids=name_of)
def test_table_rows_follow_a_heading(path: Path) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", prose(path), flags=re.MULTILINE):
        rule = [*table.splitlines(), ""][1]
        assert re.fullmatch(r"\|( -+:? \|)+", rule), table


def test_index_lists_every_page() -> None:
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "README.md")}
    assert {*DOCS.glob("*.md")} - {DOCS / "README.md"} <= linked


def test_readme_is_short_and_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= README_LINES_MAX
    assert "make serve" in text
    assert "make test" in text


def test_proxies_page_includes_the_tested_configurations() -> None:
    shown = {block.text for block in blocks(DOCS / "proxies.md")}
    assert shown == {path.read_text("utf-8") for path in (ROOT / "deploy" / "proxies").iterdir()}


def test_client_example_of_the_readme_imports_no_torch() -> None:
    """Importing torchrec prints a warning of torch's."""
    (example,) = (
        block
        for block in blocks(ROOT / "README.md")
        if block.language == "python" and "EmbedClient" in block.text
    )
    assert "torch" not in example.text
    assert "to_keyed_tensor" not in example.text
