"""Tests of the check of docstrings and comments: it reports each problem with file and line."""

from pathlib import Path

import check_prose
import pytest

LONG = "This sentence has " + "very " * 40 + "many words."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Of a body.", "begins with 'Of'"),
        ("That the client has shown.", "begins with 'That'"),
        ("As write, for others.", "begins with 'As'"),
        ("The same for gRPC.", "begins with 'The same'"),
        ("Returns a name, of whom there is one.", "says 'of whom'"),
        ("Reads on while it GOES ON.", "says 'goes on'"),
        (LONG, "has a sentence of 45 words, at most 40"),
    ],
)
def test_each_prose_rule_finds_its_violations(text: str, problem: str) -> None:
    assert check_prose.problems(text) == [problem]


@pytest.mark.parametrize(
    "text",
    [
        "Offers a stream.",
        "Returns it.",
        "Asks the server.",
        "Thatch.",
        "Hash of the row.",
        LONG[:99],
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert check_prose.problems(text) == []


def test_comments_and_docstrings_are_found_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "module.py").write_text(
        '"""A module."""\n\nLIMIT = 1\n"""Of one request."""\n\n'
        "# A comment over two lines that\n# goes on here.\nf = lambda: 1  # What it is.\n"
    )
    assert check_prose.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in lines] == ["4", "6", "8"]
    (tmp_path / "module.py").write_text('"""A module."""\n')
    assert check_prose.main([str(tmp_path)]) == 0


def test_single_file_is_checked(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Of one request."""\n')
    assert check_prose.main([str(module)]) == 1
    module.write_text('"""A module."""\n')
    assert check_prose.main([str(module)]) == 0


def test_folder_without_modules_is_an_error(tmp_path: Path) -> None:
    assert check_prose.main([str(tmp_path)]) == 1
