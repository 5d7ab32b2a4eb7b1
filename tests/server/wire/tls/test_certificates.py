"""Tests that an invalid certificate pair is rejected with a message, and the old pair stays."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from certificates import DAY, Authority, Pair, client_context
from cryptography.hazmat.primitives import serialization
from server.raw_http import OurServer, get, read_answer
from server.waiting import WAIT_S_MAX

from embedserve import file_reloader
from embedserve.wire.tls.certificates import Certificates, TlsFiles, read_context


def replace(path: str, data: bytes) -> None:
    """Replaces a file. A file of equal size, written in place within a tick of the file system's
    clock, would look unchanged.
    """
    new = Path(f"{path}.new")
    new.write_bytes(data)
    new.replace(path)


def write(files: TlsFiles, pair: Pair) -> None:
    replace(files.certificate, pair.certificate)
    replace(files.key, pair.key)


def half_of_certificate(files: TlsFiles, authority: Authority) -> None:
    path = Path(files.certificate)
    path.write_bytes(path.read_bytes()[:300])


def half_of_chain(files: TlsFiles, authority: Authority) -> None:
    path = Path(files.certificate)
    path.write_bytes(path.read_bytes() + authority.root[:300])


def half_of_key(files: TlsFiles, authority: Authority) -> None:
    path = Path(files.key)
    path.write_bytes(path.read_bytes()[:100])


def another_key(files: TlsFiles, authority: Authority) -> None:
    replace(files.key, authority.sign("other").key)


def locked_key(files: TlsFiles, authority: Authority) -> None:
    path = Path(files.key)
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locked))


def expired(files: TlsFiles, authority: Authority) -> None:
    write(files, authority.sign("server", (-30, -1)))


def not_yet(files: TlsFiles, authority: Authority) -> None:
    write(files, authority.sign("server", (1, 30)))


def empty(files: TlsFiles, authority: Authority) -> None:
    Path(files.certificate).write_bytes(b"")


def gone(files: TlsFiles, authority: Authority) -> None:
    Path(files.key).unlink()


Damage = Callable[[TlsFiles, Authority], None]
DAMAGES: dict[Damage, str] = {
    half_of_certificate: "are no pair",
    half_of_chain: "are no pair",
    half_of_key: "are no pair",
    another_key: "key values mismatch",
    locked_key: "are no pair",
    empty: "are no pair",
    expired: "certificate has expired",
    not_yet: "certificate is not yet valid",
    gone: "No such file",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pair_is_refused_with_its_file_and_without_the_key(
    files: TlsFiles, authority: Authority, damage: Damage
) -> None:
    damage(files, authority)
    with pytest.raises((OSError, ValueError)) as raised:
        read_context(files)
    said = str(raised.value)
    assert DAMAGES[damage] in said
    assert files.certificate in said or files.key in said
    assert "BEGIN" not in said
    assert "\n" not in said


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_pair_leaves_the_one_before_and_is_named_once(
    files: TlsFiles,
    authority: Authority,
    certificates: Certificates,
    damage: Damage,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    before = certificates.context
    damage(files, authority)
    for _ in range(3):
        await certificates.reloader.poll()
    assert certificates.context is before
    (record,) = caplog.records
    assert DAMAGES[damage] in record.getMessage()
    assert "stays in use" in record.getMessage()
    write(files, authority.sign("server"))
    await certificates.reloader.poll()
    assert certificates.context is not before
    assert caplog.records[-1].getMessage().endswith("read again, and right")


async def test_a_pair_that_is_not_valid_yet_is_taken_once_it_is(
    files: TlsFiles,
    authority: Authority,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(file_reloader, "RETRY_S", 0.0)
    for ahead_s in (2, 8, 32):  # on a slow host the pair may be valid before it is read
        before = certificates.context
        write(files, authority.sign("server", (timedelta(seconds=ahead_s) / DAY, 30)))
        await certificates.reloader.poll()
        if certificates.context is before:
            break
    assert "certificate is not yet valid" in caplog.text
    async with asyncio.timeout(WAIT_S_MAX):
        while certificates.context is before:
            await asyncio.sleep(0.05)
            await certificates.reloader.poll()


async def test_connections_after_a_change_get_the_new_certificate_and_those_before_go_on(
    server: OurServer,
    certificates: Certificates,
    files: TlsFiles,
    authority: Authority,
    client: ssl.SSLContext,
) -> None:
    reader, writer = await server.open(client)
    write(files, authority.sign("renewed", (-1, 60)))
    os.utime(files.certificate, ns=(1, 1))  # as after a copy that preserves times
    await certificates.reloader.poll()
    _, renewed = await server.open(client)
    names = [one.get_extra_info("peercert")["subject"][0][0][1] for one in (writer, renewed)]
    assert names == ["server", "renewed"]
    ends = renewed.get_extra_info("peercert")["notAfter"]
    assert server.pipeline.metrics.tls.expires_s() == ssl.cert_time_to_seconds(ends)
    writer.write(get("/health/live"))
    assert (await read_answer(reader))[0] == 200


@pytest.fixture
def mutual(files: TlsFiles, authority: Authority, tmp_path: Path) -> TlsFiles:
    path = tmp_path / "clients.pem"
    path.write_bytes(authority.root)
    return TlsFiles(files.certificate, files.key, str(path))


def trust(files: TlsFiles, roots: bytes) -> None:
    Path(files.client_ca).write_bytes(roots)


async def said_to(
    server: OurServer, root: bytes, pair: tuple[Path, Path] | None
) -> int | str | None:
    """Returns the response status for a client with this certificate, or the TLS error."""
    try:
        reader, writer = await server.open(client_context(root, pair))
        writer.write(get("/health/live"))
        return (await read_answer(reader))[0]
    except ssl.SSLError as error:
        return error.reason


async def test_clients_without_a_right_certificate_are_each_told_what_is_wrong(
    server: OurServer, mutual: TlsFiles, authority: Authority, tmp_path: Path
) -> None:
    right, revoked = authority.sign("right"), authority.sign("revoked")
    trust(mutual, authority.root + authority.revoke(revoked.certificate))
    server.wire._certificates = Certificates(mutual)
    pairs = {
        "right": right,
        "revoked": revoked,
        "expired": authority.sign("expired", (-2, -1)),
        "foreign": Authority("another root").sign("foreign"),
    }
    said = {name: await said_to(server, authority.root, None) for name in ["none"]}
    for name, pair in pairs.items():
        paths = pair.write(tmp_path, name)
        said[name] = await said_to(server, authority.root, paths)
    assert said == {
        "none": "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "right": 200,
        "revoked": "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "expired": "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "foreign": "TLSV1_ALERT_UNKNOWN_CA",
    }
    assert server.pipeline.metrics.tls.handshakes["certificate"] == 4


def test_a_file_without_authorities_is_refused(mutual: TlsFiles) -> None:
    trust(mutual, b"nothing")
    with pytest.raises(ValueError, match=r"tls_client_ca .*clients\.pem holds no certificates"):
        read_context(mutual)
