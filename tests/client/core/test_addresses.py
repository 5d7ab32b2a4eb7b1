"""Tests of server addresses: REST and gRPC accept the same syntax."""

import pytest
from client.fake import FakeModel

from embedserve_client import EmbedClient, GrpcEmbedClient
from embedserve_client.core.addresses import base_url_of, names_several, target_of, unix_path_of


@pytest.mark.parametrize(
    ("address", "base_url", "target"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", ("127.0.0.1:8000", False)),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", ("127.0.0.1:8000", False)),
        ("http://host:8000/", "http://host:8000/", ("host:8000", False)),
        ("https://host:8443", "https://host:8443", ("host:8443", True)),
        ("https://host", "https://host", ("host:443", True)),
        ("http://host", "http://host", ("host:80", False)),
        ("localhost", "http://localhost", ("localhost:80", False)),
        ("HTTP://Host:8000", "http://Host:8000", ("host:8000", False)),
        ("host:8000\n", "http://host:8000", ("host:8000", False)),
        ("[::1]:8000", "http://[::1]:8000", ("[::1]:8000", False)),
        ("http://[::1]:8000", "http://[::1]:8000", ("[::1]:8000", False)),
        ("unix:/run/embed", "http://localhost", ("unix:/run/embed", False)),
    ],
)
def test_address_is_accepted_by_rest_and_grpc(address: str, base_url: str, target: object) -> None:
    assert base_url_of(address) == base_url
    assert target_of(address) == target


@pytest.mark.parametrize(
    "target", ["dns:///host:8001", "unix:/run/embed", "ipv4:1.2.3.4:5,6.7.8.9:5"]
)
def test_grpc_targets_are_left_unchanged(target: str) -> None:
    assert target_of(target) == (target, False)


@pytest.mark.parametrize(
    ("target", "is_several"),
    [
        ("dns:///host:8001", True),
        ("DNS:host:8001", True),
        ("ipv4:1.2.3.4:5,6.7.8.9:5", True),
        ("ipv6:[::1]:5", True),
        ("host:8001", False),
        ("https://host", False),
        ("unix:/run/embed", False),
        ("xds:///embed", False),
    ],
)
def test_targets_with_several_servers_are_recognized(target: str, is_several: bool) -> None:
    assert names_several(target) == is_several


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("unix:/run/embed", "/run/embed"),
        ("unix:///run/embed", "/run/embed"),
        ("unix:run/embed", "run/embed"),
        ("Unix:/run/a:b c", "/run/a:b c"),
        ("unix://host/run", None),
        ("unix:", None),
        ("http://unix:80", None),
        ("host:80", None),
    ],
)
def test_unix_socket_path_is_extracted(address: str, path: str | None) -> None:
    assert unix_path_of(address) == path


@pytest.mark.parametrize(
    "address",
    [
        *("ftp://host:8000", "http://", "http://host:port", "", ":8000"),
        *("unix:", "unix://host/run", "unix-abstract:embed"),
        *("http://shop..example:8000", f"{'a' * 64}:8000", "host:8000?a=b"),
    ],
)
def test_invalid_rest_address_is_rejected(address: str) -> None:
    with pytest.raises(ValueError, match="base_url: "):
        EmbedClient(address)


@pytest.mark.parametrize(
    "address",
    [
        *("http://host:8001/embed", "https://", "http://host:99999", "ftp://host", ""),
        *("shop..example:8001", "unix:", "Unix:"),
    ],
)
def test_invalid_grpc_target_is_rejected(address: str) -> None:
    with pytest.raises(ValueError, match="target: "):
        GrpcEmbedClient(address)


@pytest.mark.parametrize("client", [EmbedClient, GrpcEmbedClient])
@pytest.mark.parametrize("host", ["host:8000", "host:99999", "[::1"])
def test_address_with_a_user_name_is_rejected_without_its_password(
    client: type[EmbedClient | GrpcEmbedClient], host: str
) -> None:
    for scheme in ("", "http://", "ftp://"):
        with pytest.raises(ValueError, match="contains a user name") as raised:
            client(f"{scheme}user:/secret@{host}")
        assert "secret" not in str(raised.value)


def test_each_client_accepts_the_address_syntax_of_the_other(
    rest_url: str, grpc_target: str, model: FakeModel
) -> None:
    with EmbedClient(rest_url.removeprefix("http://")) as client:
        assert client.embed({"user": [1]}).batch_size == 1
    with GrpcEmbedClient(f"http://{grpc_target}") as grpc:
        assert grpc.embed({"user": [1]}).batch_size == 1
    assert len(model.requests) == 2
