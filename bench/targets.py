"""Performance targets of embedserve, checked against the figures of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from measure import Row

OURS, BEFORE, TRITON = "embedserve", "embedserve before", "Triton"
INFER = "embedserve, Open Inference"
ONE_BODY = "protobuf, one body"
"""embedserve over HTTP/1, loaded like gRPC: by h2load, which repeats one request."""
CONCURRENCIES = {"64 x 1": (64, 1), "8 x 8": (8, 8)}
"""(connections, streams per connection) by title."""


@dataclass(frozen=True)
class Bar:
    """A performance target: ``value`` must be at least ``least``, or at most ``most``.

    Attributes:
        value: measured figure; None if a row is missing.
    """

    name: str
    value: float | None
    least: float | None = None
    most: float | None = None

    def said(self) -> str:
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        if self.value is None:
            return f"| {self.name} | {bound} | not measured | |"
        is_reached = (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )
        return f"| {self.name} | {bound} | {self.value:.3f} | {'yes' if is_reached else 'NO'} |"


class Rows:
    """Finds figures by server, way and concurrency."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def get(
        self, figure: str, server: str, way: str, connections: int = 64, streams: int = 1
    ) -> float | None:
        """Returns the figure of a server, or the best figure of the servers that a pattern like
        Redis* names."""
        found: list[float | None] = [
            getattr(row.figures, figure)
            for row in self._rows
            if (
                row.server == server
                or (server.endswith("*") and row.server.startswith(server[:-1]))
            )
            and (row.way, row.connections, row.streams) == (way, connections, streams)
        ]
        figures = [value for value in found if value is not None]
        if not figures or len(figures) < len(found):
            return None
        return max(figures) if figure == "rate" else min(figures)

    def rate(self, server: str, way: str, connections: int = 64, streams: int = 1) -> float | None:
        return self.get("rate", server, way, connections, streams)


def said(
    results: Mapping[str, Sequence[Row]],
    references: Mapping[str, Mapping[str, float]],
    operations: Mapping[str, Mapping[str, Any]],
) -> str:
    lines = ["## Bars", "", "| bar | bound | measured | reached |", "| --- | --- | --- | --- |"]
    for label, rows in results.items():
        of_workload: Callable[..., Iterator[Bar]] = _small if label.startswith("small") else _large
        lines += [bar.said() for bar in of_workload(label, Rows(rows), references[label])]
    lines += [bar.said() for name, found in operations.items() for bar in _operated(name, found)]
    return "\n".join([*lines, ""])


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or b == 0 else a / b


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _small(label: str, rows: Rows, reference: Mapping[str, float]) -> Iterator[Bar]:
    json, message = rows.rate(OURS, "JSON"), rows.rate(OURS, "protobuf")
    constant = "constant reply, "
    yield Bar(f"{label}: JSON / constant", _ratio(json, rows.rate(constant + "JSON", "JSON")), 0.5)
    yield Bar(f"{label}: JSON / Triton JSON", _ratio(json, rows.rate(TRITON, "JSON")), 2.3)
    if label.endswith("uniform"):  # FastAPI and Redis run with uniform ids only
        fastapi = rows.rate("hand-written FastAPI", "JSON")
        yield Bar(f"{label}: JSON / FastAPI", _ratio(json, fastapi), 20)
        redis = rows.rate("Redis*", "MGET")
        yield Bar(f"{label}: protobuf / Redis MGET", _ratio(message, redis), 0.9)
    constant_message = rows.rate(constant + "protobuf", "protobuf")
    yield Bar(f"{label}: protobuf / constant", _ratio(message, constant_message), 0.65)
    bare = _ratio(message, rows.rate(constant + "bare protocol", "protobuf"))
    yield Bar(f"{label}: protobuf / constant of a bare protocol", bare, 0.42)
    for way in ("JSON", "protobuf"):
        theirs = rows.get("p50_ms", constant + way, way, 1)
        more = _difference(rows.get("p50_ms", OURS, way, 1), theirs)
        yield Bar(f"{label}: {way}, one connection, p50 - constant's, ms", more, most=0.15)
        p99, p50 = rows.get("p99_ms", OURS, way), rows.get("p50_ms", OURS, way)
        yield Bar(f"{label}: {way}, p99 / p50", _ratio(p99, p50), most=2.5)
    yield from _small_grpc(label, rows)
    for way, said, at in (
        ("binary", "64 x 1", (64, 1)),
        *(("gRPC", said, at) for said, at in CONCURRENCIES.items()),
    ):
        ratio = _ratio(rows.rate(INFER, way, *at), rows.rate(TRITON, way, *at))
        yield Bar(f"{label}: Open Inference {way} {said} / Triton {way}", ratio, 2)
    for way in ("JSON", "protobuf"):
        before = _ratio(rows.rate(OURS, way), rows.rate(BEFORE, way))
        yield Bar(f"{label}: {way} / the server before", before, 0.97)


def _small_grpc(label: str, rows: Rows) -> Iterator[Bar]:
    for said, at in CONCURRENCIES.items():
        ours, triton = rows.rate(OURS, "gRPC", *at), rows.rate(TRITON, "gRPC", *at)
        yield Bar(f"{label}: gRPC {said} / Triton gRPC", _ratio(ours, triton), 4)
        for http1 in ("protobuf", ONE_BODY):
            ratio = _ratio(ours, rows.rate(OURS, http1))
            yield Bar(f"{label}: gRPC {said} / HTTP/1 {http1}", ratio, 1)
    unary = [rows.rate(TRITON, "gRPC", *at) for at in CONCURRENCIES.values()]
    best = None if None in unary else max(rate or 0.0 for rate in unary)
    stream = _ratio(rows.rate(OURS, "gRPC stream", 8), best)
    yield Bar(f"{label}: gRPC stream, 8 connections / Triton's best unary rate", stream, 4)
    ours_ms = rows.get("p50_ms", OURS, "gRPC", 1)
    for http1 in ("protobuf", ONE_BODY):
        more = _difference(ours_ms, rows.get("p50_ms", OURS, http1, 1))
        yield Bar(f"{label}: gRPC, one caller, p50 - HTTP/1 {http1}, ms", more, most=0.03)
    p99, p50 = rows.get("p99_ms", OURS, "gRPC"), rows.get("p50_ms", OURS, "gRPC")
    yield Bar(f"{label}: gRPC 64 x 1, p99 / p50", _ratio(p99, p50), most=2)


def _operated(name: str, found: Mapping[str, Any]) -> Iterator[Bar]:
    if name == "pauses":
        # Pauses of the machine affect a constant reply, too.
        ours, theirs = (found[f"{who}: max_ms"] for who in (OURS, "constant reply, protobuf"))
        yield Bar(
            "requests over 20 ms in the server, of 60 s", found["over_20_ms_in_the_server"], most=0
        )
        yield Bar("longest request in 60 s, for its client, ms", ours, most=20)
        yield Bar("longest request in 60 s - constant's, ms", ours - theirs, most=20)
    elif name == "workers":
        for way, figures in found.items():
            two_of_one = figures["two_of_one"]
            yield Bar(f"two workers / one on two cores, load included, {way}", two_of_one, 1.0)
            lost = figures["lost_when_one_of_two_was_killed"] / figures["of_clients"]
            yield Bar(f"lost when one of two was killed / clients, {way}", lost, most=1.0)
        grpc, http1 = (found[way]["two_of_one"] for way in ("gRPC", ONE_BODY))
        yield Bar(f"two workers / one, gRPC / HTTP/1 {ONE_BODY}", grpc / http1, 1.0)
    elif name == "heads":
        yield Bar("heads: unique ids / plain", found["traced_of_plain"], 0.95)
        yield Bar("heads: a token of 2 KB / plain", found["bearer_of_plain"], 0.9)
    elif name == "memory":
        yield Bar("private MB of a second server", max(found["private_mb"]), most=450)
    elif name == "overload":
        for way, figures in found.items():
            yield from _overloaded(f"overload, {way}", figures, way == "gRPC")


def _overloaded(said: str, figures: Mapping[str, Any], is_grpc: bool) -> Iterator[Bar]:
    yield Bar(f"{said}: load that came and ended / peak", figures["ended_of_peak"], 3.8)
    goodput = figures["goodput_of_peak"]
    yield Bar(f"{said}: goodput / peak", goodput, 0.85 if is_grpc else 0.9)
    refused = figures["refused_p99_ms"]
    yield Bar(f"{said}: 99 of 100 refusals within, ms", refused, most=50 if is_grpc else 20)
    yield Bar(f"{said}: ended neither way", figures["ended_neither_way"], most=0)
    first, second = (figures[f"memory_{half}_half_mb"] for half in ("first", "second"))
    yield Bar(f"{said}: memory, second half / first", second / first, most=1.05)


def _large(label: str, rows: Rows, reference: Mapping[str, float]) -> Iterator[Bar]:
    ours, grpc = (rows.get("p50_ms", OURS, way, 1) for way in ("protobuf", "gRPC"))
    constant = rows.get("p50_ms", "constant reply, protobuf", "protobuf", 1)
    floor = None if constant is None else constant + reference["kernel"]
    yield Bar(f"{label}: protobuf, p50 / (constant + kernel)", _ratio(ours, floor), most=1.3)
    binary, triton = (rows.get("p50_ms", TRITON, way, 1) for way in ("binary", "gRPC"))
    yield Bar(f"{label}: Triton's p50 / ours, protobuf", _ratio(binary, ours), 2.0)
    yield Bar(f"{label}: Triton's p50 / ours, gRPC", _ratio(triton, grpc), 2.0)
    for way in ("binary", "gRPC"):
        times = (rows.get("p50_ms", server, way, 1) for server in (TRITON, INFER))
        yield Bar(f"{label}: Triton's p50 / ours, Open Inference {way}", _ratio(*times), 1)
    for http1 in ("protobuf", ONE_BODY):
        ratio = _ratio(grpc, rows.get("p50_ms", OURS, http1, 1))
        yield Bar(f"{label}: gRPC, p50 / HTTP/1 {http1}", ratio, most=1.1)
    if label.startswith("bulk"):
        ratio = reference["engine"] / reference["kernel"]
        yield Bar(f"{label}: engine / bare kernel", ratio, most=1.15)
