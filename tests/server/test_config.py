"""Tests of settings: invalid settings are rejected by name, before any model loads."""

import math
import os
import re
from dataclasses import replace
from typing import Any

import pytest

from embedserve import config_checks
from embedserve.config import Limits, ServeSettings
from embedserve.config_checks import (
    CHOICES,
    ROUTER_SETTINGS,
    check_device,
    check_settings,
    delta_poll_s,
    why_fixed,
)
from embedserve_client.grpc.client import DEFAULT_RECEIVE_BYTES_MAX

PLAIN = ServeSettings(store="store")


@pytest.mark.parametrize("name", CHOICES)
def test_invalid_choice_is_rejected_and_valid_choices_are_listed(name: str) -> None:
    message = f"{name} is 'other', expected one of {', '.join(CHOICES[name])}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_settings(replace(PLAIN, **{name: "other"}))  # type: ignore[arg-type]
    plain = replace(PLAIN, shards="file:x") if name in ROUTER_SETTINGS else PLAIN
    for choice in CHOICES[name]:
        check_settings(replace(plain, **{name: choice}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(PLAIN, workers=2), "workers is 2, but the tables go to GPUs"),
        (replace(PLAIN, tables="resident"), "tables is 'resident', but they are copied to GPUs"),
    ],
)
def test_settings_that_gpus_do_not_support_are_rejected_only_on_gpus(
    settings: ServeSettings, message: str
) -> None:
    check_settings(settings)
    check_device(settings, "cpu")
    with pytest.raises(ValueError, match=message):
        check_device(settings, "cuda")
    with pytest.raises(ValueError, match=message):
        check_settings(replace(settings, devices="cuda"))


@pytest.mark.parametrize(
    ("follow", "deltas", "is_possible"),
    [
        ("none", "none", True),
        ("latest", "follow", False),
        ("alias", "none", False),
        ("alias", "follow", True),
    ],
)
def test_gpus_follow_aliases_only_for_deltas(follow: str, deltas: str, is_possible: bool) -> None:
    settings = replace(PLAIN, follow=follow, deltas=deltas)
    if is_possible:
        check_device(settings, "cuda")
        return
    with pytest.raises(ValueError, match=f"follow is '{follow}', but the tables go to GPUs"):
        check_device(settings, "cuda")


@pytest.mark.parametrize("hang_s", [0.1, 1.9])
def test_worker_hang_timeout_below_two_seconds_is_rejected(hang_s: float) -> None:
    with pytest.raises(ValueError, match=f"^worker_hang_s is {hang_s}, .*: use 2 or more, or 0"):
        check_settings(replace(PLAIN, worker_hang_s=hang_s))
    for allowed in (0, 2):
        check_settings(replace(PLAIN, worker_hang_s=allowed))


def test_resident_tables_of_several_workers_cannot_follow() -> None:
    resident = replace(PLAIN, follow="alias", tables="resident")
    check_settings(resident)
    check_settings(replace(resident, workers=2, follow="none"))
    check_settings(replace(resident, workers=2, tables="mapped"))
    with pytest.raises(ValueError, match=r"^follow is 'alias', but a version that comes while"):
        check_settings(replace(resident, workers=2))


def test_versions_on_gpus_cannot_change() -> None:
    with pytest.raises(
        ValueError, match=r"^follow is 'latest', but .* not supported yet: use none$"
    ):
        check_device(replace(PLAIN, follow="latest"), "cuda")
    assert why_fixed(PLAIN, "cuda").endswith("which is not supported yet")
    assert why_fixed(PLAIN, "cpu") == ""


@pytest.mark.parametrize(
    "endpoint",
    [
        *("localhost:4318", "grpc://collector:4317", "http://", "http://x:99999", "http://["),
        *("http://collector:4318/otlp?key=1", "http://collector:4318/#otlp"),
    ],
)
def test_otlp_endpoint_must_be_a_url(endpoint: str) -> None:
    with pytest.raises(ValueError, match=f"^otlp_endpoint is {re.escape(repr(endpoint))}, expect"):
        check_settings(replace(PLAIN, otlp_endpoint=endpoint))
    check_settings(replace(PLAIN, otlp_endpoint="https://collector:4318/otlp", trace_share=1))
    with pytest.raises(ValueError, match="trace_share is 1, but traces go nowhere"):
        check_settings(replace(PLAIN, trace_share=1))


@pytest.mark.parametrize("package", ["nowhere", "nowhere.sdk"])
def test_traces_need_opentelemetry(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(config_checks, "OPENTELEMETRY", (package,))
    with pytest.raises(ValueError, match="but OpenTelemetry is not installed: pip install"):
        check_settings(replace(PLAIN, otlp_endpoint="http://collector:4318"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(PLAIN, http_uds="/" + "a" * 107), "http_uds is '/a.*', 108 bytes: .* at most 107"),
        (replace(PLAIN, grpc_uds="\u00e4" * 54), "grpc_uds is '.*', 108 bytes: .* at most 107"),
        (replace(PLAIN, http_uds="a\0b"), "http_uds is 'a.x00b', which is no path"),
        (replace(PLAIN, http_uds="a", grpc_uds="a"), "http_uds and grpc_uds are both 'a'"),
        (
            replace(PLAIN, trusted_proxy=("10.0.0.1", "10.0.0.1/8")),
            "trusted_proxy has '10.0.0.1/8', expected an address or a network such as 10.0.0.0/8",
        ),
        (replace(PLAIN, uds_mode="rw"), "uds_mode is 'rw', expected octal digits such as 600"),
        (replace(PLAIN, uds_mode="-600"), "uds_mode is '-600', expected octal digits"),
        (replace(PLAIN, uds_mode="1777"), "uds_mode is '1777', expected 777 at most"),
    ],
)
def test_invalid_unix_sockets_are_rejected(settings: ServeSettings, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check_settings(settings)


@pytest.mark.parametrize(
    "other",
    [
        {"http_uds": "a"},
        {"grpc_uds": "a"},
        {"management_port": 0},
        {"tls_cert": "c", "tls_key": "k"},
        {"tokens": "t"},
    ],
)
def test_grpcio_is_rejected_with_all_that_it_lacks(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^grpc_server is 'grpcio', .* no Unix sockets"):
        check_settings(replace(PLAIN, grpc_server="grpcio", **other))


@pytest.mark.parametrize("name", ["host", "management_host"])
def test_empty_address_is_rejected(name: str) -> None:
    """Guards against an unset variable in a script: "" would listen on all interfaces."""
    with pytest.raises(ValueError, match=f"^{name} is '', expected an address"):
        check_settings(replace(PLAIN, **{name: ""}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["store", "cache"])
@pytest.mark.parametrize("several", [{"workers": 2}, {"deltas": "follow"}])
def test_paths_that_are_not_utf8_are_rejected_for_several_processes(
    name: str, several: dict[str, Any]
) -> None:
    other: dict[str, Any] = {name: os.fsdecode(b"/models/st\xff")}
    settings = replace(PLAIN, **other)
    check_settings(settings)
    with pytest.raises(ValueError, match=f"{name} is '/models/st.udcff', which is not UTF-8"):
        check_settings(replace(settings, **several))
    other[name] = "/models/größe"
    check_settings(replace(PLAIN, **other, **several))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(PLAIN, shards="file:x", devices="cuda"), "devices is 'cuda', .* in the shards$"),
        (
            replace(PLAIN, shards="file:x", shard_cert="c", shard_key="k"),
            "shard_cert is 'c', .* give shard_ca, too$",
        ),
        (replace(PLAIN, tls_client_ca="c"), "tls_client_ca is 'c', .* tls_cert and tls_key, too$"),
    ],
)
def test_settings_without_effect_are_rejected(settings: ServeSettings, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check_settings(settings)


def test_valid_unix_sockets_are_accepted() -> None:
    check_settings(replace(PLAIN, http_uds="/" + "a" * 106, grpc_uds="b", uds_mode="0660"))


FOLLOWED = replace(PLAIN, deltas="follow")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(FOLLOWED, devices="cuda", workers=2), "workers is 2, but the tables go to GPUs"),
        (
            replace(FOLLOWED, follow="latest", tables="resident"),
            "follow is 'latest', but a version .* that they share: use --tables mapped$",
        ),
        (
            replace(FOLLOWED, follow="latest", devices="cuda"),
            "follow is 'latest', but the tables go to GPUs",
        ),
        (replace(FOLLOWED, delta_poll_s=0.001), "delta_poll_s is 0.001, expected 0.01 to 3600"),
        (replace(FOLLOWED, delta_poll_s=math.nan), "delta_poll_s is nan, expected 0.01 to 3600"),
        (replace(FOLLOWED, delta_poll_s=math.inf), "delta_poll_s is inf, expected 0.01 to 3600"),
    ],
)
def test_settings_incompatible_with_deltas_are_rejected(
    settings: ServeSettings, message: str
) -> None:
    check_settings(FOLLOWED)
    check_settings(replace(FOLLOWED, devices="cuda"))
    check_settings(replace(FOLLOWED, tables="resident", workers=2))
    check_settings(replace(FOLLOWED, follow="latest"))
    with pytest.raises(ValueError, match=f"^{message}"):
        check_settings(settings)


def test_deltas_are_polled_more_often_in_a_local_store() -> None:
    assert delta_poll_s(FOLLOWED) == 0.05
    assert delta_poll_s(replace(FOLLOWED, store="s3://bucket/store")) == 0.25
    assert delta_poll_s(replace(FOLLOWED, delta_poll_s=3.0)) == 3.0


def test_largest_response_is_accepted_by_default_grpc_clients() -> None:
    limits = Limits()
    lengths_and_names = limits.body_bytes_max  # which the request has, too
    most = limits.request_output_bytes_max + lengths_and_names
    assert most <= DEFAULT_RECEIVE_BYTES_MAX
