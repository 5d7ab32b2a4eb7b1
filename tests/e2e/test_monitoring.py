"""Tests of Prometheus with the served demo: every query and every rule has a result."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from documents import ROOT
from e2e.demo_server import make_demo
from running_servers import ANSWER_S_MAX, free_port, running, started

from embedserve.access.grants import new_token
from embedserve_client import EmbedClient, GrpcEmbedClient

MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana" / "dashboard.json").read_text())
RULES = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]
METRICS_PAGE = (ROOT / "docs/metrics.md").read_text()
ADAPTER_RULES = yaml.safe_load((MONITORING / "adapter-rules.yaml").read_text())["rules"]
POD = {"namespace": "ranking", "pod": "embedserve-0"}
"""Labels that the Prometheus Operator adds to every series of a pod."""
WAIT_S_MAX = 120
VARIABLES = {
    "$job": "embedserve",
    "$instance": ".*",
    "$model": ".*",
    "$__rate_interval": "20s",
    "$__range": "1m",
}
FEATURES = {"user": [[37287, 7]], "history": [[111161]]}
"""No user has the id 7."""


@pytest.fixture(scope="module")
def prometheus(
    made_once: Callable[[str, Callable[[Path], None]], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """Yields a client of a Prometheus that scrapes a server under load."""
    folder = tmp_path_factory.mktemp("monitoring")
    store = made_once("demo", make_demo) / "store"
    token = make_token(folder / "tokens")
    options = ("--follow", "latest", "--tokens", folder / "tokens")
    with (
        running(store, folder / "log", *options) as server,
        EmbedClient(server.http, token=token, timeout_s=ANSWER_S_MAX) as rest,
        GrpcEmbedClient(server.grpc, token=token, timeout_s=ANSWER_S_MAX) as grpc,
        scraping_prometheus(folder, server.http.removeprefix("http://"), token) as client,
    ):

        def send_requests(_: object) -> None:
            for one in (rest, grpc):
                one.embed(FEATURES)

        client.event_hooks["request"] = [send_requests]
        yield client


def make_token(tokens: Path) -> str:
    """Writes a token file, and returns the token of a caller that may also read the metrics."""
    token, sha256 = new_token()
    grant = {"name": "ranker", "sha256": sha256, "roles": ["embed", "admin"]}
    tokens.write_text(json.dumps(grant))
    return token


@contextmanager
def scraping_prometheus(folder: Path, target: str, token: str) -> Iterator[httpx.Client]:
    """Runs Prometheus with prometheus.yaml, but scrapes ``target`` every second."""
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(MONITORING / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target], "labels": POD}]
    config["scrape_configs"][0]["authorization"] = {"credentials": token}
    path, port = folder / "prometheus.yaml", free_port()
    path.write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'series'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    url = f"http://127.0.0.1:{port}/api/v1/"
    with (
        started(command, folder / "prometheus-log", is_warm=False),
        httpx.Client(base_url=url, timeout=ANSWER_S_MAX) as client,
    ):
        yield client


def query_result(prometheus: httpx.Client, query: str, is_enough: Callable[[Any], bool]) -> Any:
    """Waits until the result of ``query`` is sufficient, and returns it."""
    end = time.monotonic() + WAIT_S_MAX
    response: Any = None
    while time.monotonic() < end:
        try:
            response = prometheus.get("query", params={"query": query}).json()
        except (httpx.TransportError, ValueError) as error:  # Prometheus is starting
            response = error
        else:
            assert response["status"] == "success", response
            if is_enough(response["data"]["result"]):
                return response["data"]["result"]
        time.sleep(0.2)
    raise AssertionError(f"{query}: {response}")


def is_number(result: list[dict[str, Any]]) -> bool:
    return bool(result) and all(one["value"][1] != "NaN" for one in result)


def queries() -> list[Any]:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    return [
        pytest.param(target["expr"], id=f"{panel['title']}, {target['legendFormat']}")
        for panel in panels
        for target in panel["targets"]
    ]


@pytest.mark.parametrize("query", queries())
def test_dashboard_query_has_a_result(prometheus: httpx.Client, query: str) -> None:
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    assert "$" not in query
    # This server has no deltas and no shards.
    if found := re.findall(r"embedserve_(?:delta|shard)_\w+", query):
        for name in found:
            assert f"`{name.removesuffix('_bucket')}`" in METRICS_PAGE
        query_result(prometheus, query, lambda _: True)
    else:
        query_result(prometheus, query, is_number)


QUERIED_VARIABLES = DASHBOARD["templating"]["list"][1:]
"""Variables after the first, which is the data source."""


@pytest.mark.parametrize("variable", QUERIED_VARIABLES, ids=lambda one: one["name"])
def test_dashboard_variable_has_values(prometheus: httpx.Client, variable: dict[str, Any]) -> None:
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
    assert found is not None
    result = query_result(prometheus, found[1].replace("$job", "embedserve"), bool)
    assert all(one["metric"][found[2]] for one in result)


def test_recorded_series_have_values(prometheus: httpx.Client) -> None:
    names = [rule["record"] for group in RULES for rule in group["rules"] if "record" in rule]
    assert names
    for name in names:
        query_result(prometheus, name, bool)


def rules_of(prometheus: httpx.Client) -> list[dict[str, Any]]:
    """Returns the rules of all groups, with their state in Prometheus."""
    groups = prometheus.get("rules").json()["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_alert_rules_are_healthy_and_none_fires(prometheus: httpx.Client) -> None:
    query_result(prometheus, "job:embedserve_requests:rate5m", bool)
    rules, end = rules_of(prometheus), time.monotonic() + WAIT_S_MAX
    while any(rule["health"] == "unknown" for rule in rules):  # one group after another
        assert time.monotonic() < end, rules
        time.sleep(0.2)
        rules = rules_of(prometheus)
    assert len(rules) == sum(len(group["rules"]) for group in RULES)
    assert {rule["health"] for rule in rules} == {"ok"}
    # An alert may become pending for a while if other work uses the cores.
    states = {rule["state"] for rule in rules if rule["type"] == "alerting"}
    assert states <= {"inactive", "pending"}


ABSENT_PREFIXES = (
    "embedserve_tls_",
    "embedserve_delta_",
    "embedserve_shard_",
    "embedserve_missing_parts_",
)
"""Prefixes of metrics that this server lacks, because it has no TLS, deltas or shards."""


def test_alerts_and_recording_rules_query_existing_metrics(
    prometheus: httpx.Client,
) -> None:
    """Checks the metrics' names: a wrong name has no samples, and its alert never fires."""
    metric_names = {
        name
        for group in RULES
        for rule in group["rules"]
        for name in re.findall(r"(?<![\w:])(?:embedserve|process)_\w+", rule["expr"])
    }
    assert len(metric_names) > 10
    for name in sorted(metric_names):
        if name.startswith(ABSENT_PREFIXES):
            assert f"`{name}`" in METRICS_PAGE
        else:
            query_result(prometheus, f"count({name})", bool)


@pytest.mark.parametrize("rule", ADAPTER_RULES, ids=lambda one: one["name"]["as"])
def test_autoscaler_metric_has_a_value_for_the_pod(
    prometheus: httpx.Client, rule: dict[str, Any]
) -> None:
    """Queries like prometheus-adapter does, which finds the series and fills in the query."""
    found = query_result(prometheus, f"count({rule['seriesQuery']})", bool)
    assert int(found[0]["value"][1]) > 0
    (one,) = query_result(prometheus, adapters_query(rule, POD["pod"]), bool)
    assert one["metric"] == {"pod": POD["pod"]}
    assert 0 <= float(one["value"][1]) < 100_000
    assert query_result(prometheus, adapters_query(rule, "another"), lambda _: True) == []


def adapters_query(rule: dict[str, Any], pod: str) -> str:
    query: str = rule["metricsQuery"]
    query = query.replace("<<.Series>>", rule["seriesQuery"].partition("{")[0])
    matchers = f'namespace="{POD["namespace"]}",pod=~"{pod}"'
    return query.replace("<<.LabelMatchers>>", matchers).replace("<<.GroupBy>>", "pod")
