"""Tests of commands that send requests to a server: the forms of its address, and tokens."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from certificates import Authority
from server.fake_engine import FakeEngine
from server.live import make_pipeline, serving
from server.other_servers import Responder, page, serve_http
from server.raw_http import OurServer
from typer.testing import CliRunner

from embedserve.access.authenticator import Authenticator
from embedserve.access.grants import new_token
from embedserve.commands import running_server
from embedserve.commands.cli import app
from embedserve.commands.running_server import TOKEN_BYTES_MAX, TOKEN_VARIABLE, ServerClient
from embedserve.pipeline import RequestPipeline
from embedserve.wire.tls.certificates import Certificates, TlsFiles
from embedserve_client.core import addresses

NO_SHADOW = "no version runs in the shadow of another"
BYTES_MAX = 1 << 20


async def run_command(command: str, *arguments: object, **variables: str) -> tuple[int, str]:
    """Runs a command; returns (exit status, output)."""
    run = CliRunner().invoke
    words = [command, *map(str, arguments)]
    done = await asyncio.to_thread(run, app, words, env=variables)
    return done.exit_code, done.output


def request_metrics(client: ServerClient) -> bytes:
    return client.request("/metrics", timeout_s=60, bytes_max=BYTES_MAX)


async def test_server_address_is_accepted_in_every_format(
    pipeline: RequestPipeline, tmp_path: Path
) -> None:
    path = tmp_path / "http.sock"
    async with serving(pipeline, unix=[str(path)]) as live:
        at = f"127.0.0.1:{live.http_port}"
        for url in (at, f"http://{at}", f"HTTP://{at}/", f"unix:{path}", f"unix://{path}"):
            # The command ignores the proxy that the environment names.
            status, output = await run_command("shadow", url, http_proxy="http://127.0.0.1:1")
            assert (status, output) == (0, f"{url}: {NO_SHADOW} (embedserve alias … --shadow)\n")
        wrong = f"http://{at}/below"
        status, output = await run_command("admin", wrong, "reload")
    assert status == 1
    assert f"{wrong}: /admin/reload: answered 404: POST /below/admin/reload: Not Found" in output
    assert "ask the port of --management-port" in output
    assert "; without one, a server accepts this only with --tokens" in output


def test_unix_socket_prefix_equals_the_clients_prefix() -> None:
    assert running_server.UNIX == addresses.UNIX


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://host", "http://", "http://host:port", "http://host:0", "", "unix:"),
        *("http://host/?a=b", "http://host/#a", "unix://host/path", "http://[::1"),
        *("http://a b", "http://ho\x7fst", "http://ho\nst", "http://host/a b"),
    ],
)
def test_invalid_address_is_rejected(url: str) -> None:
    done = CliRunner().invoke(app, ["shadow", url])
    assert done.exit_code == 1
    assert f"embedserve: url is {url!r}, expected such as http://localhost:8000" in done.output


def test_password_in_the_address_is_not_printed() -> None:
    done = CliRunner().invoke(app, ["shadow", "http://me:secret@host"])
    assert done.exit_code == 1
    assert "url contains a user name" in done.output
    assert "secret" not in done.output


async def test_tls_authenticates_server_and_client(
    pipeline: RequestPipeline, tmp_path: Path
) -> None:
    authority = Authority()
    certificate, key = authority.sign("server").write(tmp_path, "server")
    client, client_key = authority.sign("client").write(tmp_path, "client")
    root, both = tmp_path / "root.pem", tmp_path / "both.pem"
    root.write_bytes(authority.root)
    both.write_bytes(client.read_bytes() + client_key.read_bytes())
    certificates = Certificates(TlsFiles(str(certificate), str(key), str(root)))
    trusting = ("--ca", root)
    async with OurServer(pipeline, certificates) as server:
        url = f"https://localhost:{server.port}"
        for shown in (("--cert", client, "--key", client_key), ("--cert", both)):
            status, output = await run_command("shadow", url, *trusting, *shown)
            assert (status, NO_SHADOW in output) == (0, True), output
        wrong: dict[tuple[object, ...], str] = {
            (): "its certificate is not trusted: ",
            trusting: f"{url}: /metrics: it requires a client certificate",
            (*trusting, "--cert", client, "--key", key): f"cert {client} and key {key} are no pair",
            (*trusting, "--key", key): "but there is no certificate: give --cert, too",
            ("--ca", key): f"ca {key} holds no certificates",
            ("--ca", tmp_path / "none"): f"{tmp_path / 'none'}: No such file or directory",
        }
        for options, why in wrong.items():
            status, output = await run_command("shadow", url, *options)
            assert (status, why in output, len(output.splitlines())) == (1, True, 1), output
        plain = url.replace("https", "http")
        status, output = await run_command("shadow", plain)
        assert (status, "this port takes TLS only: use https://" in output) == (1, True)
    status, output = await run_command("shadow", plain, *trusting)
    assert (status, "without TLS: --ca, --cert and --key need https://" in output) == (1, True)


async def test_token_is_read_from_a_file_or_a_variable(
    engine: FakeEngine, executor: ThreadPoolExecutor, tmp_path: Path
) -> None:
    token, sha256 = new_token()
    tokens, file = tmp_path / "tokens", tmp_path / "token"
    tokens.write_text(f'{{"name": "ops", "sha256": "{sha256}", "roles": ["admin"]}}\n')
    file.write_text(f"{token}\n")
    pipeline = make_pipeline(engine, executor=executor, authenticator=Authenticator(str(tokens)))
    async with OurServer(pipeline) as server:
        url = f"127.0.0.1:{server.port}"
        assert (await run_command("shadow", url, "--token-file", file))[0] == 0
        assert (await run_command("shadow", url, **{TOKEN_VARIABLE: token}))[0] == 0
        # The file has precedence over the variable.
        from_file = ("--token-file", file)
        assert (await run_command("shadow", url, *from_file, **{TOKEN_VARIABLE: "x"}))[0] == 0
        for wrong in ("", new_token()[0]):
            status, output = await run_command("shadow", url, **{TOKEN_VARIABLE: wrong})
            assert status == 1
            assert "/metrics: answered 401: " in output
            assert "(--token-file, or the variable EMBEDSERVE_TOKEN)" in output
            assert not wrong or wrong not in output


@pytest.mark.parametrize(
    "found",
    [
        b"",
        b" \n",
        b"two secrets",
        b"secret\r\nX: y",
        b"secret\xff",
        b"s" * TOKEN_BYTES_MAX + b"ecret",
    ],
)
def test_invalid_token_file_is_rejected_without_printing_the_token(
    found: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_bytes(found)
    done = CliRunner().invoke(app, ["shadow", "localhost:1", "--token-file", str(file)])
    assert done.exit_code == 1
    assert f"{file} holds no token, which is one word" in done.output
    assert "secret" not in done.output


def test_repr_of_server_client_hides_the_token() -> None:
    assert "secret" not in repr(ServerClient("localhost", token="secret"))


def test_a_redirect_is_not_followed() -> None:
    received: list[BaseHTTPRequestHandler] = []
    with (
        serve_http(received.append) as elsewhere,
        serve_http(page("", 302, Location=elsewhere)) as url,
        pytest.raises(ConnectionError, match=r"/metrics: answered 302$"),
    ):
        request_metrics(ServerClient(url, token="secret"))
    assert received == []


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (page("half", Content_Length="9"), "IncompleteRead"),
        (page("\x1b[2J" * 1000, 500), r"answered 500: \\x1b\[2J"),
        (page("[" * 100_000, 500), r"answered 500: \[\["),
        (page("x" * (BYTES_MAX + 1)), f"the response has over {BYTES_MAX} bytes"),
        (lambda handler: handler.wfile.write(b"220 smtp\r\n\r\n"), "220 smtp"),
    ],
)
def test_unexpected_response_is_reported_as_one_printable_line(
    respond: Responder, message: str
) -> None:
    with serve_http(respond) as url, pytest.raises(ConnectionError, match=message) as caught:
        request_metrics(ServerClient(url))
    assert str(caught.value).isprintable()
    assert str(caught.value).startswith(f"{url}: /metrics: ")


def test_connection_options_require_from_metrics() -> None:
    done = CliRunner().invoke(app, ["plan", "store", "shop", "--ca", "root.pem"])
    assert done.exit_code == 1
    assert "--ca, --cert, --key and --token-file need --from-metrics" in done.output
