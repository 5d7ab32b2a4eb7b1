"""Loads a server from one core with tools written in C, and parses their figures.

wrk loads HTTP, h2load gRPC, and redis-benchmark Redis, because a Python client would be the
bottleneck. Latencies are milliseconds of single requests.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LOAD_CORE = "1"
PACKAGES = {"wrk": "wrk", "h2load": "nghttp2-client", "redis-benchmark": "redis-tools"}
WARM_UP_S = 1
"""Seconds of h2load's warm-up, which is not counted."""
TRIES_MAX = 3
"""Attempts of h2load, which occasionally counts none of the requests of a single connection."""
STREAM_MESSAGES = 200
"""Messages of one streaming call; h2load sends them without waiting for responses."""


@dataclass(frozen=True)
class Figures:
    """Figures of one run. For a stream, rate counts messages and the latencies are None."""

    rate: float
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    errors: int

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


def need(*tools: str) -> None:
    for tool in (*tools, "taskset"):
        if shutil.which(tool) is None:
            package = PACKAGES.get(tool, "util-linux")
            sys.exit(f"{tool} is missing: install Debian's package {package}")


def pinned(core: str, command: Sequence[str]) -> list[str]:
    return ["taskset", "-c", core, *command]


def run(command: Sequence[str], seconds: float) -> str:
    return subprocess.run(
        pinned(LOAD_CORE, command),
        check=True,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    ).stdout


def lua(
    path: Path,
    url_path: str,
    bodies: Sequence[bytes],
    headers: Sequence[Mapping[str, str]],
    more_headers: str = "",
    repeats: int = 1,
) -> None:
    """Writes a wrk script that posts the bodies in turn and prints its figures as JSON.

    Args:
        headers: headers of each body.
        more_headers: Lua code that sets fields of ``more`` for request ``number``, which counts
            from 1 over all ``repeats`` of the bodies. It runs once per request, before the load.
    """
    quoted = ['"' + "".join(f"\\{byte:03d}" for byte in body) + '"' for body in bodies]
    heads = [
        "{" + ",".join(f'["{name}"]="{value}"' for name, value in head.items()) + "}"
        for head in headers
    ]
    path.write_text(f"""
local bodies = {{{",".join(quoted)}}}
local headers = {{{",".join(heads)}}}
local requests = {{}}
local function add_headers(number, more)
  {more_headers}
end
function init(args)
  for number = 1, #bodies * {repeats} do
    local i = (number - 1) % #bodies + 1
    local more = {{}}
    for name, value in pairs(headers[i]) do more[name] = value end
    add_headers(number, more)
    requests[number] = wrk.format("POST", "{url_path}", more, bodies[i])
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


def http(script: Path, port: int, connections: int, seconds: float) -> Figures:
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "10s"]
    output = run([*command, "-s", str(script), f"http://127.0.0.1:{port}"], seconds)
    got = parse_wrk(output)
    rate = got["requests"] / got["seconds"]
    return Figures(rate, got["p50_ms"], got["p99_ms"], got["max_ms"], int(got["errors"]))


def parse_wrk(output: str) -> dict[str, Any]:
    """Returns the figures that a wrk script printed as JSON; exits if there are none."""
    found = re.search(r"^FIGURES (.*)$", output, re.MULTILINE)
    if found is None:
        sys.exit(f"wrk printed no figures:\n{output}")
    figures: dict[str, Any] = json.loads(found[1])
    return figures


def framed(message: bytes) -> bytes:
    """Returns the message as gRPC frames it: a flag for no compression, the length, the message."""
    return b"\0" + struct.pack(">I", len(message)) + message


GRPC_HEADERS = {"content-type": "application/grpc", "te": "trailers"}


@dataclass(frozen=True)
class Post:
    """A request that h2load repeats.

    Attributes:
        body: file with the body.
        answer_bytes: bytes of the values of a complete response. A shorter response counts as an
            error, because calls that gRPC rejects have the HTTP status 200, too.
        is_http1: whether to use HTTP/1.1; otherwise HTTP/2 with prior knowledge.
    """

    body: Path
    headers: Mapping[str, str]
    port: int
    path: str
    answer_bytes: int
    is_http1: bool = False

    def command(self, connections: int, streams: int, seconds: float, log: Path) -> list[str]:
        command = ["h2load", "-t1", f"-c{connections}", f"-m{streams}", f"-D{seconds:g}"]
        command += ["-w24", "-W24", *(["--h1"] if self.is_http1 else []), "-d", str(self.body)]
        for name, value in self.headers.items():
            command += ["-H", f"{name}: {value}"]
        return [*command, f"--log-file={log}", f"http://127.0.0.1:{self.port}{self.path}"]


def h2load(post: Post, log: Path, connections: int, streams: int, seconds: float) -> Figures:
    """Runs h2load with a warm-up; raises RuntimeError if it counts no requests."""
    command = post.command(connections, streams, seconds, log)
    command[1:1] = [f"--warm-up-time={WARM_UP_S}"]
    for _ in range(TRIES_MAX):
        log.unlink(missing_ok=True)
        output = run(command, seconds + WARM_UP_S)
        counts = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", output)
        data = re.search(r"\((\d+)\) data", output)
        if counts is None or data is None:
            sys.exit(f"h2load printed no figures:\n{output}")
        succeeded, *wrong = map(int, counts.groups())
        if succeeded or any(wrong):
            break
    else:
        raise RuntimeError(f"h2load counted no answer of {post.path} in {TRIES_MAX} runs")
    # Responses that began before the measurement and ended in it, or the reverse, cancel out.
    whole = round(int(data[1]) / post.answer_bytes) + 2 * connections * streams
    errors = sum(wrong) + max(0, succeeded - whole)
    times_ms = [ms for status, ms in read_log(log) if status == "200"]
    p50, p99, most = (quantile(times_ms, share) if times_ms else None for share in (0.5, 0.99, 1.0))
    return Figures(succeeded / seconds, p50, p99, most, errors)


def read_log(log: Path) -> Iterator[tuple[str, float]]:
    """Yields (status, milliseconds) of each request in a log of h2load, whose columns are start,
    status and time."""
    for line in log.read_text().splitlines():
        _, status, time_us = line.split("\t")[:3]
        yield status, int(time_us) / 1e3


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value below which a share of the values lies; there is at least one."""
    return sorted(values)[int(share * (len(values) - 1))]


def redis(port: int, keys: Sequence[str], rows: int, connections: int, seconds: float) -> Figures:
    """Runs MGETs of ``keys``, and replaces each __rand_int__ in them with a number below
    ``rows``."""
    requests = int(20_000 * seconds)
    command = ["redis-benchmark", "-p", str(port), "-c", str(connections), "-n", str(requests)]
    output = run([*command, "-r", str(rows), "--csv", "MGET", *keys], 60 * seconds)
    names, values = (line.strip().strip('"').split('","') for line in output.splitlines()[-2:])
    got = dict(zip(names, values, strict=True))
    p50, p99, most = (float(got[f"{name}_latency_ms"]) for name in ("p50", "p99", "max"))
    return Figures(float(got["rps"]), p50, p99, most, 0)
