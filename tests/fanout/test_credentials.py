"""Tests of the certificate and token files that a router authenticates to its shards with."""

import ssl
from pathlib import Path

import pytest
from certificates import Authority

from embedserve.config import ServeSettings
from embedserve.fanout.credentials import follow_credentials
from embedserve.shard_client.shard_connection import ConnectionOptions
from embedserve.wire.tls.certificates import advance


def settings(**files: Path) -> ServeSettings:
    shown = {name: str(path) for name, path in files.items()}
    return ServeSettings("store", shards="file:x", **shown)  # type: ignore[arg-type]


def read(**files: Path) -> ConnectionOptions:
    found: list[ConnectionOptions] = []
    follow_credentials(settings(**files), found.append)
    (options,) = found
    return options


def test_without_files_neither_tls_nor_a_token_is_used() -> None:
    options = read()
    assert options.ssl_context is None
    assert options.metadata == []
    assert follow_credentials(settings(), lambda options: None) is None


async def test_changed_token_file_is_reloaded(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    found: list[ConnectionOptions] = []
    reloader = follow_credentials(settings(shard_token=token), found.append)
    assert reloader is not None
    assert found[-1].metadata == [(b"authorization", b"Bearer first")]
    token.write_text("two words")
    await reloader.poll()
    assert len(found) == 1
    token.write_text("second")
    await reloader.poll()
    assert found[-1].metadata == [(b"authorization", b"Bearer second")]
    assert len(found) == 2


@pytest.mark.parametrize("text", ["", "\n", "two words", "a\nb", "x" * 4097, "\0", "é"])
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
    assert right.ssl_context is not None


def test_shards_that_require_alpn_are_offered_http2(tmp_path: Path) -> None:
    """Handshakes as with gRPC's own server, which rejects a client that does not offer h2."""
    authority = Authority()
    (tmp_path / "ca.pem").write_bytes(authority.root)
    shard = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shard.load_cert_chain(*authority.sign("shard").write(tmp_path, "shard"))
    shard.set_alpn_protocols(["h2"])
    router = read(shard_ca=tmp_path / "ca.pem").ssl_context
    assert router is not None
    to_shard, to_router = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = router.wrap_bio(to_router, to_shard, server_hostname="localhost")
    of_shard = shard.wrap_bio(to_shard, to_router, server_side=True)
    for one in (tls, of_shard, tls, of_shard):
        advance(one)
    assert of_shard.selected_alpn_protocol() == "h2"
