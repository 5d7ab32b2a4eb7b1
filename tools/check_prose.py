"""Checks docstrings and comments against the rules of CONTRIBUTING.md that a program can check.

    python tools/check_prose.py server model_store clients bench tools tests

Reports openings that continue the name above them ("Of a body."), phrases that have a plainer
word, and sentences of more than 40 words. Exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

OPENINGS = re.compile(r"(Of|That|As|What|Has|The same|Whose|Such)\b")
PHRASES = re.compile(
    r"\b(of whom|of which|to whom|is told|are told|goes on|go on|so many|looks after|sees to"
    r"|made anew|under way|now and then|beside the event loop)\b"
)
WORDS_MAX = 40
"""Words in a sentence. Rule 3 asks for 25; the check leaves room for lists of names."""
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+")
PARAGRAPH_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|>]|\w[\w, *`]*: ))")
DIRECTIVES = ("#!", "# noqa", "# type:")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every string that stands as a statement."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text.strip()


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every comment; consecutive lines in one column are one comment."""
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith(DIRECTIVES)
    ]
    block: list[tokenize.TokenInfo] = []
    for token in tokens:
        if block and token.start != (block[-1].start[0] + 1, block[-1].start[1]):
            yield _joined(block)
            block = []
        block.append(token)
    if block:
        yield _joined(block)


def _joined(block: list[tokenize.TokenInfo]) -> tuple[int, str]:
    return block[0].start[0], " ".join(token.string.lstrip("# ") for token in block)


def problems(text: str) -> list[str]:
    """Returns what is wrong with one docstring or comment; empty if nothing is."""
    found = []
    if opening := OPENINGS.match(text):
        found.append(f"begins with {opening[0]!r}")
    found += [f"says {phrase!r}" for phrase in sorted(set(PHRASES.findall(text.lower())))]
    for paragraph in PARAGRAPH_END.split(text):
        for sentence in SENTENCE_END.split(paragraph):
            words = len(sentence.split())
            if words > WORDS_MAX:
                found.append(f"has a sentence of {words} words, at most {WORDS_MAX}")
    return found


def check(path: Path) -> Iterator[str]:
    """Yields a line for each docstring and comment of a file that breaks a rule."""
    source = path.read_text()
    for line, text in sorted((*docstrings(ast.parse(source)), *comments(source))):
        for problem in problems(text):
            yield f"{path}:{line}: {problem}: {text[:60]!r}"


def main(given: list[str]) -> int:
    """Prints every problem in the ``given`` files and folders; returns the exit status."""
    paths = sorted(
        path
        for one in map(Path, given)
        for path in ([one] if one.is_file() else one.rglob("*.py"))
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    )
    found = [line for path in paths for line in check(path)]
    print(*found, sep="\n", end="\n" * bool(found))
    return 1 if found or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
