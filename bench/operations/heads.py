"""Cost of request headers: `small` in protobuf over HTTP/1, with realistic headers.

Plain headers are the same in every request, except Content-Length. Traced headers add an
x-request-id and a traceparent, unique per request, as behind a service mesh. Bearer headers add one
of 64 tokens of 2 KB. One server handles all kinds, in alternating rounds.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import load
import running
from measure import bodies_of
from servers.embedserve import MESSAGE, EmbedServe
from workloads import workload

CONNECTIONS = 64
REPEATS = 4
"""Passes over the 2,000 bodies. Headers thus repeat after 8,000 requests, beyond a cache of a few
thousand headers. Plain headers get as many passes, so that the load costs the same."""
TOKEN_CHARACTERS = 2048

HEADERS_OF = {
    "plain": "",
    "traced": """
  local function hex(digits)
    local said = {}
    for i = 1, digits do said[i] = string.format("%x", math.random(0, 15)) end
    return table.concat(said)
  end
  more["x-request-id"] = table.concat({hex(8), hex(4), hex(4), hex(4), hex(12)}, "-")
  more["traceparent"] = "00-" .. hex(32) .. "-" .. hex(16) .. "-01"
""",
    "bearer": f"""
  local caller = string.format("%04d", number % 64)
  more["authorization"] = "Bearer " .. string.rep(caller, {TOKEN_CHARACTERS // 4})
""",
}


def measure(rounds: int = 5, seconds: float = 3) -> dict[str, Any]:
    """Returns the median rate of each kind of headers, and its ratio to the rate of plain
    headers."""
    work, server = workload("small", "uniform"), EmbedServe()
    work.tables.make()
    bodies = bodies_of(server, MESSAGE, work)
    headers = [server.headers(MESSAGE, body) for body in bodies]
    rates: dict[str, list[float]] = {kind: [] for kind in HEADERS_OF}
    with running.running(server, work), tempfile.TemporaryDirectory() as folder:
        scripts = {kind: Path(folder) / f"{kind}.lua" for kind in HEADERS_OF}
        for kind, more in HEADERS_OF.items():
            load.lua(scripts[kind], MESSAGE.path, bodies, headers, more, REPEATS)
            load.http(scripts[kind], running.PORT, CONNECTIONS, 1)
        for _ in range(rounds):
            for kind, script in scripts.items():
                figures = load.http(script, running.PORT, CONNECTIONS, seconds)
                if figures.errors:
                    raise RuntimeError(f"{kind}: {figures.errors} requests failed")
                rates[kind].append(figures.rate)
    medians = {kind: statistics.median(rates_of) for kind, rates_of in rates.items()}
    return {
        **{f"{kind}_per_s": rate for kind, rate in medians.items()},
        **{f"{kind}_of_plain": medians[kind] / medians["plain"] for kind in ("traced", "bearer")},
    }
