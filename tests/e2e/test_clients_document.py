"""Tests of the Go and TypeScript examples of docs/clients.md, run as pasted."""

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from documents import ROOT, blocks
from e2e.demo_server import Demo
from interop.drivers import BUILD_S_MAX, GO, HERE, PROTO, install_packages, made
from interop.tools import TOOL_S_MAX, run_tool, tool

PAGE = ROOT / "docs" / "clients.md"
EXAMPLES = {one.language: (one, printed) for one, printed in pairwise(blocks(PAGE))}
"""Each example, with its printed output."""
TYPESCRIPT = [HERE / "typescript" / name for name in ("package.json", "package-lock.json")]
COMPILER_OPTIONS = ("--strict", "--target", "es2022", "--module", "nodenext", "--skipLibCheck")
DEBIAN_PLUGIN = "github.com/golang/protobuf/protoc-gen-go"
"""Plugin that writes messages and service together. The page's plugin is newer than Debian's
grpc-go."""


def generate_go(folder: Path, sources: Sequence[Path]) -> None:
    """Generates the Go package src/embedserve/embeddingpb."""
    plugin = folder / "protoc-gen-go"
    run_tool("go", "build", "-o", plugin, DEBIAN_PLUGIN, environment=GO, limit_s=BUILD_S_MAX)
    (folder / "src").mkdir()
    run_tool(
        sys.executable,
        *("-m", "grpc_tools.protoc", f"--plugin={plugin}", f"-I{PROTO.parents[1]}"),
        *(f"--go_out=plugins=grpc:{folder / 'src'}", PROTO),
    )


def run(*command: object) -> tuple[int, str]:
    """Runs a command and returns (status, output)."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=TOOL_S_MAX)
    return done.returncode, done.stdout + done.stderr


def go_programs(folder: Path, texts: Sequence[str]) -> list[tuple[object, ...]]:
    """Builds each Go program, and returns the commands that run them."""
    generated = made("go-generated", [PROTO, Path(__file__)], generate_go)
    environment = GO | {"GOPATH": f"{generated}:{GO['GOPATH']}"}
    for number, text in enumerate(texts):
        (folder / f"{number}.go").write_text(text)
        build = ("go", "build", "-o", folder / f"{number}", folder / f"{number}.go")
        run_tool(*build, environment=environment, limit_s=BUILD_S_MAX)
    return [(folder / f"{number}",) for number in range(len(texts))]


def typescript_programs(folder: Path, texts: Sequence[str], http: str) -> list[tuple[object, ...]]:
    programs = made("typescript", TYPESCRIPT, install_packages) / "node_modules" / ".bin"
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "openapi.json").write_bytes(httpx.get(f"{http}/openapi.json").content)
    names = [f"{number}.ts" for number in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        (folder / name).write_text(text)
    generate = ("openapi.json", "--output", "embedserve.ts")
    run_tool(str(programs / "openapi-typescript"), *generate, cwd=folder)
    run_tool(str(programs / "tsc"), *COMPILER_OPTIONS, *names, cwd=folder)
    return [(tool("node"), folder / f"{number}.js") for number in range(len(texts))]


def test_page_has_go_and_typescript_examples() -> None:
    assert {"go", "ts"} <= EXAMPLES.keys()
    assert all(EXAMPLES[language][1].language == "text" for language in ("go", "ts"))


@pytest.mark.parametrize("language", ["go", "ts"])
def test_example_prints_the_documented_output_and_reports_errors(
    demo: Demo, language: str, tmp_path: Path
) -> None:
    example, printed = EXAMPLES[language]
    http = demo.server.http
    text = example.text.replace("localhost:8001", demo.server.grpc)
    text = text.replace("http://localhost:8000", http)
    assert '"Sci-Fi"' in text
    texts = [text, text.replace('"Sci-Fi"', '"Sci"')]
    if language == "go":
        valid, invalid = go_programs(tmp_path, texts)
    else:
        valid, invalid = typescript_programs(tmp_path, texts, http)
    assert run(*valid) == (0, printed.text)
    status, output = run(*invalid)
    assert status == 1
    field = "features.candidate_genres[0][1]"
    assert f"{field} is 'Sci': not one of the 28 ids of 'candidate_genres'" in output
    assert language == "ts" or f"[{field}]" in output  # from the trailer
