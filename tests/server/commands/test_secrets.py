"""Tests of a server with missing or truncated secrets: it ends with one line that names the
file."""

import json
from pathlib import Path

import pytest
from certificates import Authority
from delta_keys import key_pair
from server.commands.test_cli import ANY_PORTS, check_one_line, embedserve

from embedserve.access.grants import new_token

OPTIONS = {
    "server.pem": ("--tls-cert", "tls_cert"),
    "server.key": ("--tls-key", "tls_key"),
    "ca.pem": ("--tls-client-ca", "tls_client_ca"),
    "tokens": ("--tokens", "tokens:"),
    "delta.pub": ("--delta-key", "delta key"),
}
"""Option for each file, and the words before its path in errors."""


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """Returns a folder with all files of OPTIONS, complete."""
    authority = Authority()
    authority.sign("server").write(tmp_path, "server")
    (tmp_path / "ca.pem").write_bytes(authority.root)
    (tmp_path / "tokens").write_text(json.dumps({"name": "a", "sha256": new_token()[1]}))
    key_pair(tmp_path)
    return tmp_path


def serve(secrets: Path) -> tuple[str | Path, ...]:
    """Returns the arguments of a server on a store without a model, where it ends even if all
    secrets are complete."""
    given = [word for name, (flag, _) in OPTIONS.items() for word in (flag, secrets / name)]
    (secrets / "store").mkdir()
    return "serve", secrets / "store", *ANY_PORTS, "--deltas", "follow", *given


def test_complete_secrets_are_accepted(secrets: Path) -> None:
    check_one_line(embedserve(*serve(secrets)), "no model in this store")


@pytest.mark.parametrize("name", OPTIONS)
def test_missing_secret_file_is_named(secrets: Path, name: str) -> None:
    (secrets / name).unlink()
    setting = OPTIONS[name][1].removesuffix(":")
    words = f"{setting}: [Errno 2] No such file or directory: '{secrets / name}'"
    if name == "delta.pub":
        words = f"{setting} {secrets / name}: cannot be read: No such file or directory"
    check_one_line(embedserve(*serve(secrets)), words)


@pytest.mark.parametrize("name", OPTIONS)
def test_truncated_secret_file_is_named_and_not_printed(secrets: Path, name: str) -> None:
    path = secrets / name
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    done = embedserve(*serve(secrets))
    check_one_line(done, f"{OPTIONS[name][1]} {path}")
    assert not any(line in done.stderr for line in text.splitlines() if len(line) > 20)
