"""Tests of the certificate and token files that a router authenticates to its shards with."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import Authority

from embedserve.config import ServeSettings
from embedserve.fanout.credentials import ShardCredentials


def settings(**files: Path) -> ServeSettings:
    shown = {name: str(path) for name, path in files.items()}
    return ServeSettings("store", shards="file:x", **shown)  # type: ignore[arg-type]


def read(**files: Path) -> ShardCredentials:
    return ShardCredentials(settings(**files), lambda: None)


def test_without_files_neither_tls_nor_a_token_is_used() -> None:
    credentials = read()
    assert credentials.options.ssl_context is None
    assert credentials.options.metadata == []
    assert credentials.reloader is None
    assert credentials.for_host("shard-0").server_hostname == "shard-0"


async def test_changed_token_file_is_reloaded(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    changes: list[None] = []
    credentials = ShardCredentials(settings(shard_token=token), lambda: changes.append(None))
    assert credentials.options.metadata == [(b"authorization", b"Bearer first")]
    token.write_text("two words")
    assert credentials.reloader is not None
    await credentials.reloader.poll()
    assert credentials.options.metadata == [(b"authorization", b"Bearer first")]
    assert len(changes) == 1
    token.write_text("second")
    await credentials.reloader.poll()
    assert credentials.options.metadata == [(b"authorization", b"Bearer second")]
    assert len(changes) == 2


@pytest.mark.parametrize("text", ["", "\n", "two words", "a\nb", "x" * 4097, "\0"])
def test_file_without_a_valid_token_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ValueError, match="token holds no token"):
        read(shard_token=tmp_path / "token")


def test_invalid_certificates_are_rejected(tmp_path: Path) -> None:
    authority = Authority()
    root, damaged = tmp_path / "ca.pem", tmp_path / "damaged.pem"
    root.write_bytes(authority.root)
    damaged.write_text("no certificate")
    certificate, key = authority.sign("router").write(tmp_path, "router")
    _, other_key = authority.sign("other").write(tmp_path, "other")
    with pytest.raises(ValueError, match=r"damaged\.pem holds no certificates"):
        read(shard_ca=damaged)
    with pytest.raises(ValueError, match="are no pair"):
        read(shard_ca=root, shard_cert=certificate, shard_key=other_key)
    with pytest.raises(OSError, match=r"nowhere\.pem"):
        read(shard_ca=tmp_path / "nowhere.pem")
    right = read(shard_ca=root, shard_cert=certificate, shard_key=key)
    assert right.options.ssl_context is not None
