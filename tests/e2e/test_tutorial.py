"""Tests of docs/tutorial.md: all its commands as pasted, in an empty folder."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from documents import ROOT, Block, blocks
from e2e.page_commands import assert_prints, run
from running_servers import Running, running

PAGE = ROOT / "docs" / "tutorial.md"
BLOCKS = list(blocks(PAGE))
SAVED_AS = re.findall(r"[Ss]ave (?:it|this) as `(\w+\.py)`", PAGE.read_text("utf-8"))
SERVE = "embedserve serve store --model shop"


@pytest.fixture
def server_stack(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_tutorial_commands_lead_from_training_to_the_same_vector(
    tmp_path: Path, server_stack: ExitStack
) -> None:
    saved_as, server = iter(SAVED_AS), None
    for block, following in pairwise([*BLOCKS, Block(PAGE, 0, "", "")]):
        text = with_server_address(server, block.text)
        if block.language == "python":
            (tmp_path / next(saved_as)).write_text(text)
        elif block.text.strip() == SERVE:
            log = tmp_path / "log"
            server = server_stack.enter_context(running(tmp_path / "store", log, "--model", "shop"))
        elif block.language == "sh":
            output = run(text, tmp_path)
            if following.language in ("text", "json"):
                assert_prints(following, output)
    assert server is not None
    assert next(saved_as, None) is None


def with_server_address(server: Running | None, text: str) -> str:
    """Returns ``text`` with the address of ``server`` in place of the page's address."""
    if server is None:
        return text
    return text.replace("localhost:8000", server.http.removeprefix("http://"))
