"""Tests that an invalid certificate pair is rejected with a message, and the old pair stays."""

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
from server.raw_http import OurServer, get, read_response
from server.waiting import WAIT_S_MAX

from embedserve import file_reloader
from embedserve.wire.tls.certificates import Certificates, TlsFiles, advance, read_context


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


def truncated_certificate(files: TlsFiles, authority: Authority) -> None:
    path = Path(files.certificate)
    path.write_bytes(path.read_bytes()[:300])


def truncated_chain(files: TlsFiles, authority: Authority) -> None:
    path = Path(files.certificate)
    path.write_bytes(path.read_bytes() + authority.root[:300])


def truncated_key(files: TlsFiles, authority: Authority) -> None:
    path = Path(files.key)
    path.write_bytes(path.read_bytes()[:100])


def mismatched_key(files: TlsFiles, authority: Authority) -> None:
    replace(files.key, authority.sign("other").key)


def encrypted_key(files: TlsFiles, authority: Authority) -> None:
    path = Path(files.key)
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    key_format = serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, key_format, encryption))


def expired(files: TlsFiles, authority: Authority) -> None:
    write(files, authority.sign("server", (-30, -1)))


def not_yet_valid(files: TlsFiles, authority: Authority) -> None:
    write(files, authority.sign("server", (1, 30)))


def empty_certificate(files: TlsFiles, authority: Authority) -> None:
    Path(files.certificate).write_bytes(b"")


def missing_key(files: TlsFiles, authority: Authority) -> None:
    Path(files.key).unlink()


Damage = Callable[[TlsFiles, Authority], None]
DAMAGES: dict[Damage, str] = {
    truncated_certificate: "are no pair",
    truncated_chain: "are no pair",
    truncated_key: "are no pair",
    mismatched_key: "key values mismatch",
    encrypted_key: "are no pair",
    empty_certificate: "are no pair",
    expired: "certificate has expired",
    not_yet_valid: "certificate is not yet valid",
    missing_key: "No such file",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_invalid_pair_is_rejected_with_its_file_name_and_no_key_data(
    files: TlsFiles, authority: Authority, damage: Damage
) -> None:
    damage(files, authority)
    with pytest.raises((OSError, ValueError)) as raised:
        read_context(files)
    message = str(raised.value)
    assert DAMAGES[damage] in message
    assert files.certificate in message or files.key in message
    assert "BEGIN" not in message
    assert "\n" not in message


@pytest.mark.parametrize("damage", DAMAGES)
async def test_invalid_pair_keeps_the_previous_pair_and_is_logged_once(
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


async def test_future_pair_is_loaded_once_it_becomes_valid(
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


async def test_new_connections_get_the_renewed_certificate_and_open_ones_continue(
    server: OurServer,
    certificates: Certificates,
    files: TlsFiles,
    authority: Authority,
    client: ssl.SSLContext,
) -> None:
    reader, writer = await server.open(context=client)
    write(files, authority.sign("renewed", (-1, 60)))
    os.utime(files.certificate, ns=(1, 1))  # as after a copy that preserves times
    await certificates.reloader.poll()
    _, renewed = await server.open(context=client)
    names = [one.get_extra_info("peercert")["subject"][0][0][1] for one in (writer, renewed)]
    assert names == ["server", "renewed"]
    ends = renewed.get_extra_info("peercert")["notAfter"]
    assert server.pipeline.metrics.tls.expires_s() == ssl.cert_time_to_seconds(ends)
    writer.write(get("/health/live"))
    assert (await read_response(reader))[0] == 200


@pytest.fixture
def mutual(files: TlsFiles, authority: Authority, tmp_path: Path) -> TlsFiles:
    path = tmp_path / "clients.pem"
    path.write_bytes(authority.root)
    return TlsFiles(files.certificate, files.key, str(path))


def trust(files: TlsFiles, roots: bytes) -> None:
    Path(files.client_ca).write_bytes(roots)


async def connect_as(
    server: OurServer, root: bytes, pair: tuple[Path, Path] | None
) -> int | str | None:
    """Returns the response status for a client with this certificate, or the TLS error."""
    try:
        reader, _ = await server.open(get("/health/live"), client_context(root, pair))
        return (await read_response(reader))[0]
    except ssl.SSLError as error:
        return error.reason


async def test_invalid_client_certificates_get_specific_tls_alerts(
    server: OurServer, mutual: TlsFiles, authority: Authority, tmp_path: Path
) -> None:
    valid, revoked = authority.sign("right"), authority.sign("revoked")
    trust(mutual, authority.root + authority.revoke(revoked.certificate))
    server.wire._certificates = Certificates(mutual)
    pairs = {
        "right": valid,
        "revoked": revoked,
        "expired": authority.sign("expired", (-2, -1)),
        "foreign": Authority("another root").sign("foreign"),
    }
    message = {name: await connect_as(server, authority.root, None) for name in ["none"]}
    for name, pair in pairs.items():
        paths = pair.write(tmp_path, name)
        message[name] = await connect_as(server, authority.root, paths)
    assert message == {
        "none": "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "right": 200,
        "revoked": "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "expired": "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "foreign": "TLSV1_ALERT_UNKNOWN_CA",
    }
    assert server.pipeline.metrics.tls.handshakes["certificate"] == 4


def session_after(
    server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLSession | None, bool]:
    """Returns the client's session after a handshake in memory, and whether it resumed
    ``session``."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    there = server.wrap_bio(to_server, to_client, server_side=True)
    here = client.wrap_bio(to_client, to_server, server_hostname="localhost", session=session)
    while not (advance(here) and advance(there)):
        advance(there)
    there.write(b"ready")  # tickets come before it
    assert here.read(5) == b"ready"
    return here.session, here.session_reused is True


@pytest.mark.parametrize("is_mutual", [True, False])
def test_session_with_a_client_certificate_is_not_resumed(
    mutual: TlsFiles, authority: Authority, tmp_path: Path, is_mutual: bool
) -> None:
    """The certificate may have expired since the session began, which a resumed one does not
    notice."""
    alone = TlsFiles(mutual.certificate, mutual.key)
    server = Certificates(mutual if is_mutual else alone).context
    client = client_context(authority.root, authority.sign("right").write(tmp_path, "right"))
    session, _ = session_after(server, client)
    _, is_resumed = session_after(server, client, session)
    assert is_resumed != is_mutual


def test_client_ca_file_without_certificates_is_rejected(mutual: TlsFiles) -> None:
    trust(mutual, b"nothing")
    with pytest.raises(ValueError, match=r"tls_client_ca .*clients\.pem holds no certificates"):
        read_context(mutual)
