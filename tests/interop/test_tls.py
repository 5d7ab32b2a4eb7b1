"""Tests of client certificates and tokens with curl, openssl, Node, Java and grpcio."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import yaml
from certificates import Authority, Pair
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import pkcs12
from interop.drivers import Call, node_driver
from interop.lookups import MODEL, lookup
from interop.tools import run_tool, tool
from running_servers import Running, run_warm_command, running

from embedserve_client import EmbedClient, GrpcEmbedClient, Unauthenticated

HERE = Path(__file__).parent
COMPONENT = Path(__file__).parents[2] / "deploy" / "kubernetes" / "components" / "exec-probes"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
PASSWORD = b"changeit"
SHORT_LIVED = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Options of Java for a program of one second, which is not worth optimizing."""


@dataclass(frozen=True)
class Secured:
    """A server with TLS, client certificates and tokens, and the files of its clients.

    Attributes:
        token: token of a caller that may send requests to the model.
        folder: NAME.pem and NAME.key of each client, root.pem, clients.pem, http.sock.
    """

    server: Running
    folder: Path
    token: str
    expired: str
    authority: Authority

    @property
    def ca(self) -> str:
        return str(self.folder / "root.pem")

    def pair(self, name: str) -> tuple[str, str]:
        return str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")

    def curl(self, name: str, *options: str, path: str = f"/models/{MODEL}/embed") -> str:
        """Returns the HTTP status and version, or curl's exit status and error."""
        certificate = ("--cert", self.pair(name)[0], "--key", self.pair(name)[1]) if name else ()
        url = self.server.http.replace("http://127.0.0.1", "https://localhost") + path
        shown = ("--silent", "--show-error", "--output", "/dev/null", "--write-out")
        done = subprocess.run(
            [
                *(tool("curl"), *shown, "%{response_code} %{http_version}", "--cacert", self.ca),
                *(*certificate, "--data-binary", "@-", *options, url),
            ],
            input=lookup(1).json_body,
            capture_output=True,
            timeout=60,
        )
        return done.stdout.decode() if not done.returncode else done.stderr.decode()


def make_token(file: Path, name: str, *options: str) -> str:
    done = run_warm_command("token", name, *options)
    assert done.returncode == 0, done.stderr
    with file.open("a") as lines:
        lines.write(done.stdout)
    return done.stderr.strip()


@pytest.fixture(scope="module")
def secured(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder, authority = tmp_path_factory.mktemp("secured"), Authority()
    pairs: dict[str, Pair] = {
        "server": authority.sign("server"),
        "ranker": authority.sign("ranker"),
        "stranger": authority.sign("stranger"),
        "expired": authority.sign("expired", (-2, -1)),
        "foreign": Authority("another").sign("ranker"),
        "revoked": authority.sign("revoked"),
    }
    for name, pair in pairs.items():
        pair.write(folder, name)
    (folder / "root.pem").write_bytes(authority.root)
    revoked = authority.revoke(pairs["revoked"].certificate)
    (folder / "clients.pem").write_bytes(authority.root + revoked)
    tokens = folder / "tokens"
    token = make_token(tokens, "batch", "--models", MODEL, "--requests-per-second", "1000")
    expired = make_token(tokens, "late", "--expires", "2999-01-01")
    tokens.write_text(tokens.read_text().replace("2999-01-01", "2020-01-01"))
    with tokens.open("a") as lines:
        lines.write('{"name": "by-certificate", "certificate": "ranker"}\n')
    options: tuple[object, ...] = (
        "--tls-cert",
        folder / "server.pem",
        "--tls-key",
        folder / "server.key",
    )
    options += ("--tls-client-ca", folder / "clients.pem")
    log = folder / "log"
    more = ("--tokens", tokens, "--workers", 2, "--http-uds", folder / "http.sock")
    with running(store, log, *options, *more, has_management_port=True) as server:
        yield Secured(server, folder, token, expired, authority)
    output = log.read_text()
    for secret in (token, expired, "BEGIN"):
        assert secret not in output


@pytest.mark.parametrize("version", ["2", "1.1"])
def test_curl_is_authorized_by_certificate_or_token(secured: Secured, version: str) -> None:
    option = {"2": "--http2", "1.1": "--http1.1"}[version]
    bearer = ("--header", f"Authorization: Bearer {secured.token}")
    expired_bearer = ("--header", f"Authorization: Bearer {secured.expired}")
    assert secured.curl("ranker", option) == f"200 {version}"
    assert secured.curl("stranger", option) == f"401 {version}"
    assert secured.curl("stranger", option, *bearer) == f"200 {version}"
    assert secured.curl("stranger", option, *expired_bearer) == f"401 {version}"
    assert secured.curl("stranger", option, *bearer, path="/models/no/embed") == f"403 {version}"
    expected_alerts = {
        "": "alert certificate required",
        "expired": "alert certificate expired",
        "foreign": "alert unknown ca",
        "revoked": "alert certificate revoked",
    }
    for name, output in expected_alerts.items():
        assert output in secured.curl(name, option, *bearer)


def test_openssl_cannot_use_old_tls_versions_or_renegotiation(secured: Secured) -> None:
    certificate, key = secured.pair("ranker")
    port = secured.server.http.rpartition(":")[2]
    common = ["s_client", "-connect", f"localhost:{port}", "-CAfile", secured.ca]
    common += ["-cert", certificate, "-key", key]
    for version in ("-tls1", "-tls1_1"):
        done = subprocess.run(
            [tool("openssl"), *common, version], input=b"", capture_output=True, timeout=60
        )
        assert done.returncode != 0
    output = run_tool("openssl", *common, "-tls1_2", "-alpn", "h2", stdin=b"Q\n").decode()
    assert "ALPN protocol: h2" in output
    assert "Compression: NONE" in output
    done = subprocess.run(
        [tool("openssl"), *common, "-tls1_2"], input=b"R\n", capture_output=True, timeout=60
    )
    assert b"no renegotiation" in done.stderr


def test_node_is_authorized_by_certificate_or_token(secured: Secured) -> None:
    driver = node_driver()
    requested = lookup(1)
    target = f"localhost:{secured.server.grpc.rpartition(':')[2]}"
    expected_codes = {
        ("ranker", ""): grpc.StatusCode.OK,
        ("stranger", ""): grpc.StatusCode.UNAUTHENTICATED,
        ("stranger", secured.token): grpc.StatusCode.OK,
        ("stranger", secured.expired): grpc.StatusCode.UNAUTHENTICATED,
        ("foreign", secured.token): grpc.StatusCode.UNAVAILABLE,
    }
    for (name, token), code in expected_codes.items():
        certificate, key = secured.pair(name)
        files = {"TLS_CA": secured.ca, "TLS_CERT": certificate, "TLS_KEY": key}
        driver.environment.update(files)
        metadata = {"authorization": f"Bearer {token}"} if token else {}
        calls = [
            Call(method, [requested], metadata=metadata) for method in ("Embed", "EmbedStream")
        ]
        ended = driver(target, *calls)
        assert [one.code for one in ended] == [code, code]
        if code is grpc.StatusCode.OK:
            assert all(one.responses == [requested.response] for one in ended)


@pytest.mark.skipif(shutil.which("javac") is None, reason="there is no JDK")
def test_java_is_authorized_by_its_token(secured: Secured) -> None:
    root = pkcs12.PKCS12Certificate(x509.load_pem_x509_certificate(secured.authority.root), b"root")
    store = secured.folder / "stranger.p12"
    certificate, key = (Path(path).read_bytes() for path in secured.pair("stranger"))
    store.write_bytes(
        pkcs12.serialize_java_truststore([root], serialization.BestAvailableEncryption(PASSWORD))
    )
    name = ("-name", "pair", "-passin", "pass:", "-passout", "pass:changeit")
    pair = secured.folder / "pair.p12"
    chain = secured.folder / "chain.pem"
    chain.write_bytes(certificate + key)
    run_tool("openssl", "pkcs12", "-export", "-in", chain, "-out", pair, *name)
    passwords = ("-srcstorepass", "changeit", "-deststorepass", "changeit", "-noprompt")
    stores = ("-srckeystore", pair, "-destkeystore", store)
    quick = (f"-J{option}" for option in SHORT_LIVED)
    run_tool("keytool", *quick, "-importkeystore", *stores, *passwords)
    url = secured.server.http.replace("http://127.0.0.1", "https://localhost") + "/embed"
    arguments = (HERE / "java" / "Client.java", url, store, "changeit", secured.token, "")
    output = run_tool("java", *SHORT_LIVED, *arguments, stdin=lookup(1).json_body)
    accepted, rejected = output.splitlines()
    assert accepted.startswith(b"HTTP_2 200 {")
    assert rejected.startswith(b"HTTP_2 401 {")


def test_embedserve_clients_are_authorized_by_their_token(secured: Secured) -> None:
    features = {"user": [[1]], "movie": [[2]]}
    ca, certificate = secured.ca, secured.pair("stranger")
    for make, address in (
        (EmbedClient, secured.server.http),
        (GrpcEmbedClient, secured.server.grpc),
    ):
        url = f"https://localhost:{address.rpartition(':')[2]}"
        with make(url, token=secured.token, ca=ca, certificate=certificate) as client:
            assert client.embed(features, model=MODEL).values.shape == (1, 72)
        with make(url, ca=ca, certificate=certificate) as client, pytest.raises(Unauthenticated):
            client.embed(features, model=MODEL)


def test_kubernetes_probes_over_the_unix_socket_need_no_certificate(secured: Secured) -> None:
    """Runs the probes of the component mtls like kubelet does.

    Over the port, readiness is not reported.
    """
    deployment = yaml.safe_load((COMPONENT / "pods.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {
        "EMBEDSERVE_HOST": "0.0.0.0",
        "EMBEDSERVE_HTTP_PORT": secured.server.http.rpartition(":")[2],
        "EMBEDSERVE_TLS_CERT": secured.pair("server")[0],
    }
    commands = [container[probe]["exec"]["command"][1:] for probe in PROBES]
    assert commands == [["health"], ["health"], ["health", "--ready"]]
    for command in commands:
        uds = {"EMBEDSERVE_HTTP_UDS": str(secured.folder / "http.sock")}
        done = run_warm_command(*command, environment=environment | uds)
        assert (done.returncode, done.stderr) == (0, "")
        done = run_warm_command(*command, environment=environment)
        is_ready = "--ready" in command
        assert (done.returncode, "it requires a client certificate" in done.stderr) == (
            is_ready,
            is_ready,
        )
