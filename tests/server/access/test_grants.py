"""Tests of the token file: every key, and the error of an invalid line, which quotes no values."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embedserve.access.grants import GRANTS_MAX, Grant, hash_of, new_token, read_grants

SHA = "0" * 64


def read_lines(folder: Path, *lines: dict[str, Any] | str) -> list[Grant]:
    path = folder / "tokens"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return read_grants(str(path))


@pytest.fixture
def tokyo_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "JST-9")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("tokyo_time")
def test_every_key_of_a_grant_is_read(tmp_path: Path) -> None:
    full = {
        "name": "ranker",
        "sha256": SHA,
        "certificate": "spiffe://cluster/ranker",
        "models": ["movies"],
        "roles": ["embed", "admin"],
        "expires": "2027-01-31T14:00:00+02:00",
        "requests_per_second": 2.5,
        "concurrent": 8,
        "revoked": True,
    }
    plain = {"name": "batch", "sha256": "1" * 64, "expires": "2027-01-31"}
    assert read_lines(tmp_path, "# who asks", full, "", plain) == [
        Grant(
            "ranker",
            (SHA,),
            "spiffe://cluster/ranker",
            frozenset({"movies"}),
            frozenset({"embed", "admin"}),
            1801396800.0,
            2.5,
            8,
            True,
        ),
        Grant("batch", ("1" * 64,), expires_s=1801353600.0),
    ]


SECRET = "es_what-nobody-may-see"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "no JSON at column 1"),
        ('{"name": "x", "sha', "no JSON at column"),
        ("[]", "no JSON object"),
        pytest.param("[" * 100_000, "no JSON object", id="nested deeply"),
        ({"sha256": SHA}, "name is missing"),
        ({"name": "x"}, "neither sha256 nor certificate"),
        ({"name": "x", "token": SECRET}, "a key is none of name, sha256"),
        ({"name": "x", "sha256": SECRET}, "sha256 is not 64 hexadecimal digits"),
        ({"name": "x", "sha256": []}, "sha256 is not one hash, or a list of up to 2"),
        ({"name": "x", "sha256": [SHA] * 3}, "sha256 is not one hash, or a list of up to 2"),
        ({"name": "x", "sha256": [5]}, "sha256 is not 64 hexadecimal digits"),
        ({"name": "x", "sha256": [SHA, SECRET]}, "sha256 is not 64 hexadecimal digits"),
        ({"name": "second", "sha256": ["a" * 64, "f" * 64]}, "the same name or token as line 1"),
        ({"name": "x", "sha256": SHA.upper() + "A"}, "sha256 is not 64 hexadecimal digits"),
        ({"name": "two words", "sha256": SHA}, "name is not up to 128"),
        ({"name": 7, "sha256": SHA}, "name is not up to 128"),
        ({"name": "x", "sha256": SHA, "models": "movies"}, "models is not a list"),
        ({"name": "x", "sha256": SHA, "models": []}, "models is not a list"),
        ({"name": "x", "sha256": SHA, "models": ["movies", 5]}, "models is not a list"),
        ({"name": "x", "sha256": SHA, "roles": []}, "roles is not a list"),
        (
            {"name": "x", "sha256": SHA, "roles": ["embed", "root"]},
            "roles is not a list of embed and admin",
        ),
        ({"name": "x", "sha256": SHA, "roles": [["embed"]]}, "roles is not a list"),
        ({"name": "x", "sha256": SHA, "roles": 5}, "roles is not a list"),
        ({"name": "x", "sha256": SHA, "expires": "soon"}, "expires is not a time"),
        ({"name": "x", "sha256": SHA, "expires": 5}, "expires is not a time"),
        (
            {"name": "x", "sha256": SHA, "expires": "0001-01-01T00:00:00+01:00"},
            "expires is not a time",
        ),
        ({"name": "x", "sha256": SHA, "requests_per_second": 0}, "not a number above 0"),
        ({"name": "x", "sha256": SHA, "requests_per_second": True}, "not a number above 0"),
        ({"name": "x", "sha256": SHA, "requests_per_second": "2"}, "not a number above 0"),
        ({"name": "x", "sha256": SHA, "concurrent": 0}, "not a whole number above 0"),
        ({"name": "x", "sha256": SHA, "concurrent": 1.5}, "not a whole number above 0"),
        ({"name": "x", "sha256": SHA, "concurrent": True}, "not a whole number above 0"),
        ({"name": "x", "sha256": SHA, "revoked": "no"}, "neither true nor false"),
        ({"name": "first", "sha256": SHA}, "the same name or token as line 1"),
        ({"name": "second", "sha256": "f" * 64}, "the same name or token as line 1"),
        ({"name": "x", "certificate": "ranker"}, "the same name or token as line 1"),
    ],
)
def test_invalid_line_is_named_but_not_quoted(tmp_path: Path, line: Any, message: str) -> None:
    first = {"name": "first", "sha256": "f" * 64, "certificate": "ranker"}
    with pytest.raises(ValueError, match=r"^\S*/tokens, line 2: ") as raised:
        read_lines(tmp_path, first, line)
    assert message in str(raised.value)
    assert "nobody-may-see" not in str(raised.value)


def test_binary_empty_or_oversized_token_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is no text"):
        read_grants(str(path))
    with pytest.raises(ValueError, match="^" + re.escape(f"{path} has no line of a caller") + "$"):
        read_lines(tmp_path, "# who asks", "")
    many = [{"name": f"n{i}", "sha256": f"{i:064x}"} for i in range(GRANTS_MAX + 1)]
    with pytest.raises(ValueError, match=f"over {GRANTS_MAX} lines"):
        read_lines(tmp_path, *many)


def test_new_tokens_are_long_and_unique() -> None:
    tokens = {new_token()[0] for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(len(one) == 46 and one.startswith("es_") for one in tokens)
    token, sha256 = new_token()
    assert hash_of(token.encode()) == sha256
