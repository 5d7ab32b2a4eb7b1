"""Tests of docs/parts.md: its commands as pasted, after those of the tutorial that it continues."""

import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

from documents import ROOT, Block, blocks
from e2e.page_commands import assert_prints, run
from e2e.parts_cluster import SLOW_CALL_OPTIONS
from running_servers import command, free_port, started, wait_until_ready

PAGE = ROOT / "docs" / "parts.md"
TUTORIAL = list(blocks(ROOT / "docs" / "tutorial.md"))
SERVERS = ("embedserve serve ", "embedserve cluster ")
DEFAULT_PORTS = ("8000", "8001")
PORT = re.compile(r"\b80[0-3][01]\b")
"""Ports of the page. The test replaces them by free ones."""


class Page:
    """Running servers of the page."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._ports: dict[str, str] = {}
        self._cluster = stack.enter_context(ExitStack())

    def adapt(self, text: str) -> str:
        """Returns ``text`` with free ports in place of the page's ports."""
        return PORT.sub(lambda found: self._port(found[0]), text)

    def _port(self, of_page: str) -> str:
        return self._ports.setdefault(of_page, str(free_port()))

    def start(self, line: str) -> None:
        """Starts a server of the page. The cluster ends before later servers start."""
        if "--http-port" not in line:
            line += " --http-port {} --grpc-port {}".format(*DEFAULT_PORTS)
        if line.startswith(SERVERS[1]) or "--shards" in line:
            line += " {} {}".format(*SLOW_CALL_OPTIONS)
        if line.startswith(SERVERS[1]):
            self._cluster.enter_context(self._running(line))
            return
        self._cluster.close()
        self._stack.enter_context(self._running(line))

    @contextmanager
    def _running(self, line: str) -> Iterator[None]:
        _, *arguments = shlex.split(self.adapt(line))
        log = self._folder / f"{arguments[arguments.index('--http-port') + 1]}.log"
        words = command(*arguments)
        with started(words, log, cwd=self._folder, has_warm_children=True) as process:
            port = arguments[arguments.index("--http-port") + 1]
            wait_until_ready(process, log, f"http://127.0.0.1:{port}")
            yield
        assert process.returncode == 0


def follow_tutorial(folder: Path) -> None:
    """Makes the checkpoint, description and store that the page continues from."""
    [script] = [block for block in TUTORIAL if "write_expected(model" in block.text]
    (folder / "train.py").write_text(script.text)
    run("python train.py", folder)
    for beginning in ("embedserve describe", "embedserve publish"):
        [block] = [one for one in TUTORIAL if one.text.startswith(beginning)]
        run(block.text, folder)


def test_commands_of_the_page_return_the_vectors_of_the_tutorial(tmp_path: Path) -> None:
    follow_tutorial(tmp_path)
    found = list(blocks(PAGE))
    responses = []
    with ExitStack() as stack:
        page = Page(tmp_path, stack)
        for block, following in pairwise([*found, Block(PAGE, 0, "", "")]):
            if block.language == "json" and block.text.startswith('{"0"'):
                (tmp_path / "shards.json").write_text(page.adapt(block.text))
            if block.language != "sh":
                continue
            printed = ""
            for line in block.text.splitlines():
                if line.startswith(SERVERS):
                    page.start(line)
                else:
                    printed += run(page.adapt(line), tmp_path)
            if following.language in ("text", "json") and printed:
                assert_prints(following, printed)
            if block.text.startswith("curl"):
                responses.append(printed)
    cluster, servers = responses
    assert cluster == servers
