"""Tests of the CAs that a REST client trusts, and of invalid files: the given CAs are trusted,
otherwise the system's with https:// and none with http://."""

import ssl
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority

from embedserve_client.core.security import channel_credentials, tls_context


@pytest.mark.parametrize("url", ["http://host:8000", "HTTP://host"])
def test_without_tls_no_certificate_authorities_are_trusted(url: str) -> None:
    context = tls_context(url, None, None)
    assert context.cert_store_stats()["x509_ca"] == 0
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize("url", ["https://host", "HTTPS://host:8443"])
def test_system_certificate_authorities_are_trusted_by_default(url: str) -> None:
    context = tls_context(url, None, None)
    assert context.cert_store_stats() == ssl.create_default_context().cert_store_stats()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize("url", ["https://host", "http://host"])
def test_given_certificate_authorities_are_trusted(url: str, tmp_path: Path) -> None:
    root = tmp_path / "root.pem"
    root.write_bytes(Authority().root)
    for path in (str(root), root):
        assert tls_context(url, path, None).cert_store_stats()["x509_ca"] == 1
    none = str(tmp_path / "none.pem")
    for files in ((none, None), (root, (root, none))):
        with pytest.raises(FileNotFoundError, match=none):
            tls_context(url, *files)


@pytest.mark.parametrize("make", [partial(tls_context, "https://host"), channel_credentials])
def test_invalid_files_are_rejected(make: Any, tmp_path: Path) -> None:
    authority = Authority()
    chain, key = authority.sign("caller").write(tmp_path, "caller")
    _, other_key = authority.sign("other").write(tmp_path, "other")
    empty = tmp_path / "empty.pem"
    empty.touch()
    make(chain, (chain, key))
    for ca, files in (
        (empty, None),
        (key, None),
        (None, (chain, other_key)),
        (None, (empty, key)),
    ):
        with pytest.raises(ssl.SSLError):
            make(ca, files)
