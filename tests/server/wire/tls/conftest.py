"""Fixtures of the TLS tests: an authority, a server with its certificate, and its clients."""

import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from certificates import Authority, client_context
from server.raw_http import OurServer

from embedserve.pipeline import RequestPipeline
from embedserve.wire.tls.certificates import Certificates, TlsFiles


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> TlsFiles:
    certificate, key = authority.sign("server").write(tmp_path, "server")
    return TlsFiles(str(certificate), str(key))


@pytest.fixture
def certificates(files: TlsFiles) -> Certificates:
    return Certificates(files)


@pytest.fixture
async def server(pipeline: RequestPipeline, certificates: Certificates) -> AsyncIterator[OurServer]:
    async with OurServer(pipeline, certificates) as server:
        yield server


@pytest.fixture
def client(authority: Authority) -> ssl.SSLContext:
    return client_context(authority.root)
