"""Tests of NVIDIA's load generator perf_analyzer, unmodified: all its requests succeed.

It also reports how long requests waited and were looked up. It needs Debian's libb64-0d.
"""

import csv
import ctypes
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from interop.drivers import python_programs
from interop.lookups import MODEL, ROWS
from running_servers import Running

pytestmark = pytest.mark.soak
REQUESTS = 40
"""Number of different requests."""
RUN_S_MAX = 120
MEASUREMENT = (
    *("--concurrency-range", "4", "--measurement-mode", "count_windows"),
    *("--measurement-request-count", "300", "--max-trials", "3", "--stability-percentage", "999"),
)


@pytest.fixture(scope="module")
def perf_analyzer() -> list[str]:
    """Returns the command of perf_analyzer."""
    programs = python_programs("perf_analyzer")
    (runtime,) = programs.parent.glob("lib/python3*/site-packages/nvidia/cuda_runtime/lib")
    try:
        ctypes.CDLL("libb64.so.0d")
    except OSError:
        pytest.fail("libb64.so.0d is missing: install Debian's package libb64-0d", pytrace=False)
    return ["env", f"LD_LIBRARY_PATH={runtime}", str(programs / "perf_analyzer")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes perf_analyzer's input: two jagged examples in each request."""
    random = np.random.default_rng(0)
    requests = []
    for _ in range(REQUESTS):
        tensors = {}
        for feature, rows in ROWS.items():
            lengths = random.integers(0, 5, 2) + 1
            ids = random.integers(0, rows, lengths.sum())
            for part, values in (("ids", ids), ("lengths", lengths)):
                tensor = {"content": values.tolist(), "shape": [len(values)]}
                tensors[f"{feature}.{part}"] = tensor
        requests.append(tensors)
    path = tmp_path_factory.mktemp("perf_analyzer") / "data.json"
    path.write_text(json.dumps({"data": requests}))
    return path


@pytest.mark.parametrize("protocol_options", [["http"], ["grpc"], ["grpc", "--streaming"]])
def test_perf_analyzer_requests_succeed_and_server_times_are_reported(
    server: Running,
    perf_analyzer: list[str],
    data: Path,
    tmp_path: Path,
    protocol_options: list[str],
) -> None:
    url = server.grpc if protocol_options[0] == "grpc" else server.http.removeprefix("http://")
    options = [
        "-m",
        MODEL,
        "-u",
        url,
        "-i",
        *protocol_options,
        "--input-data",
        str(data),
        *MEASUREMENT,
    ]
    done = subprocess.run(
        [*perf_analyzer, *options, "-f", str(tmp_path / "report.csv")],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "report.csv").open() as file:
        (report,) = csv.DictReader(file)
    assert float(report["Inferences/Second"]) > 0
    assert float(report["Server Queue"]) > 0
    assert float(report["Server Compute Infer"]) > 0
    metrics = server.metrics()
    counter_lines = [
        line for line in metrics.splitlines() if line.startswith("embedserve_requests_t")
    ]
    assert counter_lines
    assert all('outcome="OK"' in line for line in counter_lines), counter_lines
