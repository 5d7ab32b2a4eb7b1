"""The `small` workload: one user, 8 features of 0 to 8 ids, 64 dims, tables of 100,000 rows.

Starts, in turn, a constant-reply ASGI application and embedserve, each on core 0 and on the
same uvicorn, drives them with wrk from core 1, and prints what share of the constant reply's
rate embedserve reaches, in JSON and in protobuf. Figures of one run are compared with each
other only.

    python bench/small.py [--seconds 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

FEATURES = 8
ROWS = 100_000
DIM = 64
IDS_MAX = 8
BODIES = 2_000
SERVER_CORE, LOAD_CORE = "0", "1"
HTTP_PORT, GRPC_PORT = 18_080, 18_081
BENCH = Path(__file__).parent
STORE = BENCH / "results" / "store"
PROTOBUF = "application/x-protobuf"


def publish_tables() -> dict[str, np.ndarray]:
    """The tables, published as model `small` unless they are; returned to check answers with."""
    rng = np.random.default_rng(0)
    rows = {f"t{i}": rng.standard_normal((ROWS, DIM), dtype=np.float32) for i in range(FEATURES)}
    if not (STORE / "small" / "1" / "manifest.json").exists():
        import torch
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

        from embedserve_store import publish

        tables = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=ROWS,
                embedding_dim=DIM,
                feature_names=[f"f{i}"],
                pooling=PoolingType.SUM,
            )
            for i, name in enumerate(rows)
        ]
        ebc = EmbeddingBagCollection(tables=tables)
        with torch.no_grad():
            for name, values in rows.items():
                ebc.embedding_bags[name].weight.copy_(torch.from_numpy(values))
        publish(ebc, STORE, model="small")
    return rows


def make_requests() -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(1)
    return [
        {
            f"f{i}": rng.integers(0, ROWS, rng.integers(0, IDS_MAX + 1)).tolist()
            for i in range(FEATURES)
        }
        for _ in range(BODIES)
    ]


def encode(request: dict[str, list[int]], content_type: str) -> bytes:
    if content_type == PROTOBUF:
        from embedserve_proto.embedding_pb2 import EmbedRequest

        return EmbedRequest(
            keys=request,
            ids=[i for ids in request.values() for i in ids],
            lengths=[len(ids) for ids in request.values()],
        ).SerializeToString()
    features = {name: [ids] for name, ids in request.items()}
    return json.dumps({"features": features}, separators=(",", ":")).encode()


def write_lua(path: Path, requests: list[dict[str, list[int]]], content_type: str) -> None:
    """A wrk script that sends the requests in turn and prints its figures as JSON."""
    bodies = [encode(request, content_type) for request in requests]
    literals = ",\n".join('"' + "".join(f"\\{byte:03d}" for byte in body) + '"' for body in bodies)
    path.write_text(f"""
local bodies = {{{literals}}}
local headers = {{["Content-Type"] = "{content_type}"}}
local requests = {{}}
function init(args)
  for i, body in ipairs(bodies) do
    requests[i] = wrk.format("POST", "/embed", headers, body)
  end
end
local next_request = 0
function request()
  next_request = next_request % #requests + 1
  return requests[next_request]
end
function done(summary, latency, requests)
  io.write(string.format(
    'FIGURES {{"requests": %d, "seconds": %f, "errors": %d, "p50_ms": %f, "p99_ms": %f, ' ..
    '"max_ms": %f}}\\n', summary.requests, summary.duration / 1e6,
    summary.errors.connect + summary.errors.read + summary.errors.write +
    summary.errors.status + summary.errors.timeout,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3))
end
""")


def post(body: bytes, content_type: str) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{HTTP_PORT}/embed", body, {"Content-Type": content_type}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read()


def pooled(request: dict[str, list[int]], rows: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate(
        [rows[f"t{i}"][request[f"f{i}"]].sum(axis=0, dtype=np.float64) for i in range(FEATURES)]
    )


def check_answers(requests: list[dict[str, list[int]]], rows: dict[str, np.ndarray]) -> None:
    """A fast wrong answer is no figure: some answers of both formats are compared first."""
    from embedserve_proto.embedding_pb2 import EmbedResponse

    for request in requests[:50]:
        expected = pooled(request, rows)
        answer = json.loads(post(encode(request, "application/json"), "application/json"))
        response = EmbedResponse.FromString(post(encode(request, PROTOBUF), PROTOBUF))
        for values in (answer["values"][0], np.frombuffer(response.values, "<f4")):
            np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)


@contextmanager
def running(name: str, command: list[str]) -> Iterator[None]:
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            ["taskset", "-c", SERVER_CORE, *command], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            wait_until_up(name, process, log.name)
            yield
        finally:
            process.terminate()
            process.wait(timeout=20)


def wait_until_up(name: str, process: subprocess.Popen[bytes], log: str) -> None:
    for _ in range(600):
        if process.poll() is not None:
            sys.exit(f"{name} ended with status {process.returncode}:\n{Path(log).read_text()}")
        try:
            url = f"http://127.0.0.1:{HTTP_PORT}/health/ready"
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"{name} was not ready after a minute:\n{Path(log).read_text()}")


def load(script: Path, connections: int, seconds: float) -> dict[str, float]:
    output = subprocess.run(
        [
            "taskset",
            "-c",
            LOAD_CORE,
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{seconds:g}s",
            "--timeout",
            "10s",
            "-s",
            str(script),
            f"http://127.0.0.1:{HTTP_PORT}",
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = re.search(r"^FIGURES (.*)$", output, re.MULTILINE)
    if found is None:
        sys.exit(f"wrk printed no figures:\n{output}")
    figures: dict[str, float] = json.loads(found[1])
    if figures["errors"]:
        sys.exit(f"{figures['errors']:g} requests failed:\n{output}")
    figures["rate"] = figures["requests"] / figures["seconds"]
    return figures


def measure(
    servers: dict[str, list[str]],
    scripts: dict[str, Path],
    arguments: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """The median of each figure over the rounds, by "server, format, connections"."""
    samples: dict[str, list[dict[str, float]]] = {}
    for round_number in range(arguments.rounds):
        for server, command in servers.items():
            print(f"round {round_number + 1}: {server} …", file=sys.stderr)
            with running(server, command):
                for kind, script in scripts.items():
                    if server.startswith("constant") and not server.endswith(kind):
                        continue
                    for connections in (64, 1):
                        load(script, connections, 1)
                        figures = load(script, connections, arguments.seconds)
                        label = f"{server.split()[0]} {kind} {connections}"
                        samples.setdefault(label, []).append(figures)
    return {
        label: {name: statistics.median(f[name] for f in figures) for name in figures[0]}
        for label, figures in samples.items()
    }


def report(results: dict[str, dict[str, float]]) -> None:
    print(
        "| answer | connections | constant reply, requests/s | embedserve, requests/s "
        "| share | p50 ms (constant) | p99 ms (constant) |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in ("json", "protobuf"):
        for connections in (64, 1):
            ours = results[f"embedserve {kind} {connections}"]
            constant = results[f"constant {kind} {connections}"]
            print(
                f"| {kind} | {connections} | {constant['rate']:,.0f} | {ours['rate']:,.0f} "
                f"| {ours['rate'] / constant['rate']:.2f} "
                f"| {ours['p50_ms']:.2f} ({constant['p50_ms']:.2f}) "
                f"| {ours['p99_ms']:.2f} ({constant['p99_ms']:.2f}) |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for tool in ("wrk", "taskset"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is missing: install Debian's package (wrk, util-linux)")
    if (os.cpu_count() or 1) < 2:
        sys.exit("two cores are needed: one serves, one loads")
    rows = publish_tables()
    requests = make_requests()
    embedserve = [
        sys.executable,
        "-m",
        "embedserve",
        "serve",
        str(STORE),
        "--http-port",
        str(HTTP_PORT),
        "--grpc-port",
        str(GRPC_PORT),
    ]
    with tempfile.TemporaryDirectory() as folder:
        scripts, servers = {}, {}
        types = {"json": "application/json", "protobuf": PROTOBUF}
        with running("embedserve", embedserve):
            check_answers(requests, rows)
            for kind, content_type in types.items():
                scripts[kind] = Path(folder) / f"{kind}.lua"
                write_lua(scripts[kind], requests, content_type)
                reply = Path(folder) / f"{kind}.reply"
                reply.write_bytes(post(encode(requests[0], content_type), content_type))
                servers[f"constant {kind}"] = [
                    sys.executable,
                    str(BENCH / "constant_reply.py"),
                    str(reply),
                    content_type,
                    str(HTTP_PORT),
                ]
        servers["embedserve"] = embedserve
        results = measure(servers, scripts, arguments)
    report(results)
    path = BENCH / "results" / "small.json"
    path.write_text(json.dumps(results, indent=1))
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
