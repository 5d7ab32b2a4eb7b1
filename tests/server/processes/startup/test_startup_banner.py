"""Tests of the startup banner: log lines about settings at the start, and about models when
ready."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.fake_models import model_info
from server.fake_parts import FakeParts, in_parts
from server.python import run_warm_python

from embedserve.config import ServeSettings
from embedserve.model_info import ModelInfo
from embedserve.processes.startup.ports import Ports
from embedserve.processes.startup.startup_banner import log_ready, warn_about_settings
from embedserve_store.parts.part import Part

PORTS = Ports("127.0.0.1", 8000, 8001, None, None)  # type: ignore[arg-type]


ONE = model_info("m", {"a": (3, 4)})
ON_GPU = replace(model_info(), device_type="cuda", example={"user": [[1]]})
IN_PARTS = replace(in_parts(model_info(), FakeParts()), local_tables=("t_tag",))
ROUTER = {"shards": "shards.yaml"}
TLS = {"tls_cert": "cert.pem", "tls_key": "key.pem"}


def banner(
    capsys: pytest.CaptureFixture[str], model: ModelInfo, ports: Ports, settings: dict[str, Any]
) -> str:
    """Returns the banner of a server that is ready after a second, on one line."""
    log_ready([model], ports, 1.0, ServeSettings(store="", **settings))
    return " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize(
    ("model", "settings", "shown"),
    [
        (ON_GPU, {}, "shop version 7: 3 tables over 1 cuda rank ("),
        (replace(ON_GPU, replicas=4), {}, ": 4 replicas of 3 tables over 1 cuda rank ("),
        (replace(ON_GPU, replicas=2), {}, ": 2 replicas of 3 tables over 1 cuda rank ("),
        (ONE, {}, ": 1 table over 1 cpu rank (1 table_wise), "),
        (model_info("m", {"a": (3, 4), "b": (3, 4)}), {}, ": 2 tables over 1 cpu rank (2 table_wi"),
        (replace(ONE, served_name="m@7"), {}, "m version 7: 1 table"),
        (replace(ONE, served_name="m@stable"), {}, "m version 7 (stable): 1 table"),
        (replace(ONE, part=Part(0, 2)), {"part": "0/2"}, "m version 7: part 0/2, 1 table over"),
        (IN_PARTS, ROUTER, ": 3 tables in the shards of 2 parts, t_tag also here ready"),
        (replace(IN_PARTS, local_tables=()), ROUTER, ": 3 tables in the shards of 2 parts ready"),
        (IN_PARTS, {}, ": 3 tables over 1 cpu rank"),
        (ONE, {}, "(docs at http://127.0.0.1:8000/docs)"),
        (ONE, {"tokens": "t"}, "(console at http://127.0.0.1:8000/console)"),
    ],
)
def test_banner_describes_the_model_and_names_a_page_that_opens_in_a_browser(
    capsys: pytest.CaptureFixture[str], model: ModelInfo, settings: dict[str, Any], shown: str
) -> None:
    assert shown in banner(capsys, model, PORTS, settings)


@pytest.mark.parametrize(
    ("ports", "settings", "shown"),
    [
        (
            {},
            {},
            "1.0 s: REST http://127.0.0.1:8000 (docs at http://127.0.0.1:8000/docs), gRPC 127",
        ),
        ({}, {"workers": 2}, "1.0 s: 2 workers, REST http"),
        ({}, TLS, "REST https://127.0.0.1:8000 (docs at https://127.0.0.1:8000/docs)"),
        (
            {"host": "0.0.0.0"},
            {},
            "REST http://localhost:8000 (docs at http://localhost:8000/docs)",
        ),
        ({"host": "::"}, {}, "curl -s http://localhost:8000/models/m/embed"),
        ({"host": "::1"}, {}, "(docs at http://[::1]:8000/docs), gRPC [::1]:8001 try:"),
        (
            {"management": 9000},
            {},
            "REST http://127.0.0.1:8000 (docs at http://127.0.0.1:9000/docs",
        ),
        ({"management": 9000}, TLS, "(docs at http://127.0.0.1:9000/docs), "),
        (
            {"management": 9000},
            {**TLS, "management_host": "10.0.0.1"},
            "(docs at https://10.0.0.1:9000/docs), ",
        ),
        ({"management": 9000}, {"management_host": "10.0.0.1"}, "(docs at http://10.0.0.1:9000/do"),
    ],
)
def test_banner_names_addresses_that_callers_on_this_host_can_use(
    capsys: pytest.CaptureFixture[str], ports: dict[str, Any], settings: dict[str, Any], shown: str
) -> None:
    assert shown in banner(capsys, ONE, replace(PORTS, **ports), settings)


def test_example_command_has_the_options_that_the_server_requires(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {**TLS, "tls_client_ca": "ca.pem", "tokens": "tokens"}
    command = (
        'curl -s --cacert cert.pem --cert CLIENT.pem -H "Authorization: Bearer $TOKEN" https://127.'
    )
    assert command in banner(capsys, ONE, PORTS, settings)


def test_banner_of_a_shard_has_no_example_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "curl" not in banner(capsys, replace(ONE, part=Part(0, 2)), PORTS, {"part": "0/2"})


MANAGEMENT = {"management_port": 0, "management_host": "10.0.0.1"}
DOUBTFUL: dict[str, tuple[dict[str, Any], list[str]]] = {
    "defaults": ({}, []),
    "tokens, on loopback": ({"tokens": "tokens"}, []),
    "all": ({"host": "0.0.0.0", "tokens": "tokens", **TLS}, []),
    "clients' certificates": ({"host": "0.0.0.0", "tls_client_ca": "ca.pem", **TLS}, []),
    "nothing": ({"host": "0.0.0.0"}, ["host is '0.0.0.0', without tokens and without TLS"]),
    "no tokens": ({"host": "::", **TLS}, ["host is '::', without tokens: "]),
    "no TLS": (
        {"host": "10.0.0.1", "tokens": "tokens"},
        ["host is '10.0.0.1', with tokens and without TLS"],
    ),
    "management elsewhere": (
        {"tokens": "tokens", **MANAGEMENT},
        ["management_host is '10.0.0.1', with tokens and without TLS"],
    ),
    "management on loopback": ({"management_port": 0}, []),
    "no management port": ({"management_host": "10.0.0.1"}, []),
    "no alias": ({"follow": "alias", "model": ("a", "b@3")}, ["no model is named NAME@ALIAS"]),
    "no model": ({"follow": "alias"}, ["no model is named NAME@ALIAS"]),
    "an alias": ({"follow": "alias", "model": ("a", "b@stable")}, []),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_doubtful_settings_are_logged(caplog: pytest.LogCaptureFixture, name: str) -> None:
    values, expected = DOUBTFUL[name]
    warn_about_settings(ServeSettings(store="", **values))
    assert len(caplog.records) == len(expected)
    for message, start in zip(caplog.messages, expected, strict=True):
        assert start in message
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_doubtful_settings_are_logged_once_per_start(tmp_path: Path) -> None:
    """Covers workers, and checks that the lines come before loading: here there is no model to
    load."""
    options = ["--host", "0.0.0.0", "--http-port", "0", "--grpc-port", "0", "--workers", "2"]
    arguments = ["embedserve", "serve", str(tmp_path), *options]
    code = f"import sys; from embedserve.__main__ import main; sys.argv = {arguments}; main()"
    done = run_warm_python("-c", code)
    assert done.returncode == 1
    assert done.stderr.count("without tokens and without TLS") == 1


def test_misspelt_variables_are_named_and_those_of_kubernetes_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kubernetes = (
        *("PORT", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP"),
        *("PORT_8000_TCP_ADDR", "PART_0_SERVICE_HOST", "PART_0_PORT", "MANAGEMENT_SERVICE_HOST"),
    )
    for name in ("WORKER", "HTTP_PROT", "WORKERS", "TOKEN", "BY", *kubernetes):
        monkeypatch.setenv(f"EMBEDSERVE_{name}", "1")
    warn_about_settings(ServeSettings(""))
    assert caplog.messages == [
        "EMBEDSERVE_HTTP_PROT has no effect: did you mean EMBEDSERVE_HTTP_PORT?",
        "EMBEDSERVE_WORKER has no effect: did you mean EMBEDSERVE_WORKERS?",
    ]
