"""Tests of deltas that a broker notifies a server of: it serves them immediately.

It shows no secret.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from brokers import KINDS, QUOTED, Broker
from brokers import running as running_broker
from running_servers import ANSWER_S_MAX, running
from waits import wait_until

from embedserve_client import EmbedClient
from embedserve_store import DeltaWriter, TableSpec, publish

HOUR = "3600"


@pytest.mark.parametrize("kind", KINDS)
def test_server_is_notified_of_each_delta(tmp_path: Path, kind: str) -> None:
    """Checks a server that polls hourly: it serves notified deltas, also after the broker died."""
    store, log = tmp_path / "store", tmp_path / "log"
    weights = {"ebc.embedding_bags.t.weight": torch.zeros(10, 4)}
    publish(weights, store, model="m", tables=[TableSpec("t", 10, 4, ("f",), "sum", "float32")])
    url_file = tmp_path / "broker.url"
    with running_broker(Broker(kind, tmp_path, has_password=True)) as broker:
        url_file.write_text(broker.url)
        options = ("--deltas", "follow", "--delta-poll-s", HOUR, "--delta-notify", url_file)

        def state() -> str:
            return str(server.model()["deltas"]["notify"])

        def connected() -> str:
            lines = server.metrics().splitlines()
            (line,) = (one for one in lines if "notify_connected{" in one)
            return line.rpartition(" ")[2]

        with (
            running(store, log, *options, has_management_port=True) as server,
            DeltaWriter(store, model="m", notify=url_file) as writer,
            EmbedClient(server.http, timeout_s=ANSWER_S_MAX) as client,
        ):
            wait_until(lambda: state() == "connected")
            for seq in (1, 2):
                writer.push_rows({"t": ([3], np.full((1, 4), seq, np.float32))})
                wait_until(lambda: client.embed({"f": [[3]]}).seq == seq)  # noqa: B023
                assert client.embed({"f": [[3]]}).values.tolist() == [[seq] * 4]
            assert connected() == "1.0"
            broker.kill()
            wait_until(lambda: state() == "disconnected")
            assert connected() == "0.0"
            assert client.embed({"f": [[3]]}).seq == 2
            shown = subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True)
            models = server.get("/models").text
            text = log.read_text()
    assert broker.address in text
    for where in (text, shown.stdout, models):
        assert "sesame" not in where
        assert QUOTED not in where


def test_invalid_notify_setting_prevents_the_start(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="delta notify: the scheme is 'kafka'; expected redis"):
        start_with_invalid_setting(tmp_path)


def start_with_invalid_setting(tmp_path: Path) -> None:
    options = ("--deltas", "follow", "--delta-notify", "kafka://broker")
    with running(tmp_path, tmp_path / "log", *options):
        pass
