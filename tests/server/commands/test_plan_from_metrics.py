"""Tests of `embedserve plan --from-metrics`: it reads a server's metrics, and rejects other
pages."""

import re
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch
from prometheus_client import generate_latest
from server.fake_engine import make_request
from server.fake_models import served_of
from server.other_servers import page, serve_http
from typer.testing import CliRunner, Result

from embedserve.batching.join import adapt_to_model, join
from embedserve.commands.cli import app
from embedserve.commands.running_server import ServerClient
from embedserve.commands.server_metrics import read_samples
from embedserve.metrics.metrics import Metrics
from embedserve.model_info import ModelInfo
from embedserve_store import ModelStore, TableSpec, publish

DRIP_S = 0.02


@pytest.fixture
def model(two_rank_store: Path) -> ModelInfo:
    """Returns a model of seven rows, four of them on rank 0."""
    version = ModelStore(two_rank_store).load("shop", "1")
    return served_of(version.manifest, version.translator, version.plan)


def metrics_page(*models: ModelInfo, ids: tuple[int, ...] = (0, 1, 2, 6)) -> str:
    """Returns the metrics of a server after one lookup of ``ids`` in each model."""
    metrics = Metrics(models)
    for one in metrics.models.values():
        if ids:
            batch = join(
                [adapt_to_model(make_request({"user": [list(ids)]}), one.model)], one.model
            )
            assert batch is not None
            one.version.lookups.observe(batch)
    return generate_latest(metrics.registry()).decode()


def run(store: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", str(store), "shop", *map(str, arguments)])


def test_current_and_predicted_balance_are_shown(two_rank_store: Path, model: ModelInfo) -> None:
    with serve_http(page(metrics_page(model))) as url:
        result = run(two_rank_store, "--from-metrics", url)
    assert result.exit_code == 0, result.output
    assert "no better plan was found: today's stays" in result.stderr
    assert "t_user (100% of the bytes read): divided by rows as it is today" in result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert "of 4 rows that were read of shop version 1, on each rank" in result.stdout
    assert ["rank", "0", *(["64", "B", "75.0%", "75.0%"] * 2)] in lines
    assert ["rank", "1", *(["48", "B", "25.0%", "25.0%"] * 2)] in lines
    assert ["max/mean", *(["1.14", "1.50", "1.50"] * 2)] in lines


def test_predicted_bytes_on_gpus_count_padded_rows(tmp_path: Path) -> None:
    rows = {"embedding_bags.t_user.weight": torch.ones(7, 4)}
    tables = [TableSpec("t_user", 7, 4, ("user",), "sum", "int8")]
    publish(rows, tmp_path, model="shop", tables=tables, sharding="row_wise", world_size=2)
    version = ModelStore(tmp_path).load("shop")
    on_gpus = replace(
        served_of(version.manifest, version.translator, version.plan), device_type="cuda"
    )
    with serve_http(page(metrics_page(on_gpus))) as url:
        result = run(tmp_path, "--from-metrics", url, "--device-type", "cuda")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["rank", "0", *(["64", "B", "75.0%", "75.0%"] * 2)] in lines, result.output
    assert ["rank", "1", *(["48", "B", "25.0%", "25.0%"] * 2)] in lines


def test_counts_of_all_names_of_a_version_are_added(two_rank_store: Path, model: ModelInfo) -> None:
    both = metrics_page(model, replace(model, served_name="shop@canary"))
    with serve_http(page(both)) as url:
        result = run(two_rank_store, "1", "--from-metrics", url, "--world-size", "1")
    assert "of 8 rows that were read of shop version 1" in result.stdout
    assert ["rank", "1", "48", "B", "25.0%", "25.0%"] in [
        line.split() for line in result.stdout.splitlines()
    ]


def with_version(model: ModelInfo, number: int) -> ModelInfo:
    manifest = replace(model.manifest, version=number)
    return served_of(manifest, model.translator, model.plan)


def test_metrics_that_do_not_match_the_version_are_rejected(
    two_rank_store: Path, model: ModelInfo
) -> None:
    renamed = replace(model.manifest.tables[0], name="t_other")
    other = served_of(
        replace(model.manifest, tables=(renamed,)),
        model.translator,
        replace(model.plan, tables={"t_other": model.plan.tables["t_user"]}),
    )
    text = metrics_page(model)
    without_rank_1 = re.sub(r"embedserve_rank_lookups_total\{.*rank=\"1\".*\n", "", text)
    not_counted = re.sub(r"(rank_lookups_total\{.*\}) 3.0", r"\1 NaN", text)
    for page_text, message in (
        (
            metrics_page(with_version(model, 2)),
            "does not serve shop version 1: it serves shop version 2",
        ),
        (metrics_page(model).replace('"shop"', '"\x1b[2J"'), r"it serves \x1b[2J version 1"),
        (metrics_page(other), "tables of shop version 1 are t_other, in the store they are t_user"),
        (metrics_page(model, ids=()), "no row of shop version 1 was read since it began to count"),
        ("embedserve_workers 1.0\n", "it counts no lookups by table"),
        ("<html>a page</html>", "is no embedserve"),
        (text.replace('rank="1"', 'rank="7"'), "embedserve_table_bytes has no rank 1"),
        (without_rank_1, "its metrics are of different numbers of ranks"),
        (not_counted, "rank_lookups_total is nan, expected a count"),
        (text + "embedserve_rank_lookups_total{model=} x\n", "are not what Prometheus reads"),
    ):
        with serve_http(page(page_text)) as url:
            result = run(two_rank_store, "1", "--from-metrics", url)
        assert (result.exit_code, result.stdout) == (1, ""), result.output
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"embedserve: {url}: "), line
        assert message in line


def test_unreachable_metrics_server_is_reported(two_rank_store: Path, tmp_path: Path) -> None:
    with serve_http(page("")) as url:
        pass
    for wrong, message in (
        (url, "/metrics: [Errno 111] Connection refused"),
        ("ftp://localhost", "url is 'ftp://localhost', expected such as http://localhost:8000"),
    ):
        result = run(two_rank_store, "--from-metrics", wrong)
        assert result.exit_code == 1
        assert message in result.stderr
    description = tmp_path / "tables.yaml"
    description.write_text("tables: []")
    arguments = ["plan", str(description), "--from-metrics", url]
    result = CliRunner().invoke(app, arguments)
    assert "--from-metrics needs a published version: name a store and its model" in result.stderr


def test_slow_or_endless_metrics_responses_are_aborted() -> None:
    """Covers a server that sends nothing, one that sends single bytes, each well within the
    timeout, and one whose response never ends."""
    is_over = threading.Event()

    def silent(_: BaseHTTPRequestHandler) -> None:
        is_over.wait()

    def dripping(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not is_over.wait(DRIP_S):
            handler.wfile.write(b"#")

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not is_over.is_set():
            handler.wfile.write(b"embedserve_workers 1.0\n" * 1000)

    for respond, timeout_s, message in (
        (silent, 0.5, "no complete response after 0.5 s|timed out"),
        (dripping, 0.5, "no complete response after 0.5 s|timed out"),
        (endless, 60.0, "the response has over 1000000 bytes"),
    ):
        is_over.clear()
        with serve_http(respond) as url:
            try:
                with pytest.raises(ConnectionError, match=f"{url}: .*({message})"):
                    read_samples(ServerClient(url), ["embedserve_"], timeout_s, 1_000_000)
            finally:
                is_over.set()
