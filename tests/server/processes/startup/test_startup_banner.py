"""Tests of the startup banner: log lines about settings at the start, and about models when
ready."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.fake_models import model_info
from server.python import run_warm_python

from embedserve.config import ServeSettings
from embedserve.model_info import ModelInfo
from embedserve.processes.startup.ports import Ports
from embedserve.processes.startup.startup_banner import log_ready, warn_about_settings

PORTS = Ports("127.0.0.1", 8000, 8001, None, None)  # type: ignore[arg-type]


ONE = model_info("m", {"a": (3, 4)})
ON_GPU = replace(model_info(), device_type="cuda", example={"user": [[1]]})


@pytest.mark.parametrize(
    ("model", "tokens", "shown"),
    [
        (ON_GPU, "", ": 3 tables over 1 cuda rank ("),
        (replace(ON_GPU, replicas=4), "", ": 4 replicas of 3 tables over 1 cuda rank ("),
        (ONE, "", ": 1 table over 1 cpu rank (1 table_wise), "),
        (model_info("m", {"a": (3, 4), "b": (3, 4)}), "", ": 2 tables over 1 cpu rank (2 table_wi"),
        (ONE, "", "(docs at http://127.0.0.1:8000/docs)"),
        (ONE, "t", "(console at http://127.0.0.1:8000/console)"),
    ],
    ids=["one replica", "replicas", "one table", "tables", "docs", "console asks for a token"],
)
def test_banner_describes_the_model_and_names_a_page_that_opens_in_a_browser(
    capsys: pytest.CaptureFixture[str], model: ModelInfo, tokens: str, shown: str
) -> None:
    log_ready([model], PORTS, 1.0, ServeSettings(store="", tokens=tokens))
    assert shown in " ".join(capsys.readouterr().err.split())


TLS = {"tls_cert": "cert.pem", "tls_key": "key.pem"}
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
