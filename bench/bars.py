"""What this server is meant to reach, checked against the figures of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from measure import Row

OURS, TRITON = "embedserve", "Triton"


@dataclass(frozen=True)
class Bar:
    """``value`` should be at least ``least``, or at most ``most``; None where a row is missing."""

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
        return f"| {self.name} | {bound} | {self.value:.2f} | {'yes' if is_reached else 'NO'} |"


class Rows:
    """Looks figures up by server, way and concurrency."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def get(
        self, figure: str, server: str, way: str, connections: int = 64, streams: int = 1
    ) -> float | None:
        """Of the server, or the best of those that a pattern such as Redis* names."""
        found = [
            getattr(row.figures, figure)
            for row in self._rows
            if (
                row.server == server
                or (server.endswith("*") and row.server.startswith(server[:-1]))
            )
            and (row.way, row.connections, row.streams) == (way, connections, streams)
        ]
        if not found or None in found:
            return None
        return max(found) if figure == "rate" else min(found)

    def rate(self, *key: object) -> float | None:
        return self.get("rate", *key)  # type: ignore[arg-type]


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


def _small(label: str, rows: Rows, reference: Mapping[str, float]) -> Iterator[Bar]:
    json, message = rows.rate(OURS, "JSON"), rows.rate(OURS, "protobuf")
    constant = "constant reply, "
    yield Bar(f"{label}: JSON / constant", _ratio(json, rows.rate(constant + "JSON", "JSON")), 0.5)
    yield Bar(f"{label}: JSON / Triton JSON", _ratio(json, rows.rate(TRITON, "JSON")), 2.3)
    if label.endswith("uniform"):  # which FastAPI and Redis are asked for alone
        fastapi = rows.rate("hand-written FastAPI", "JSON")
        yield Bar(f"{label}: JSON / FastAPI", _ratio(json, fastapi), 20)
        redis = rows.rate("Redis*", "MGET")
        yield Bar(f"{label}: protobuf / Redis MGET", _ratio(message, redis), 0.9)
    constant_message = rows.rate(constant + "protobuf", "protobuf")
    yield Bar(f"{label}: protobuf / constant", _ratio(message, constant_message), 0.65)
    for way in ("JSON", "protobuf"):
        ours = rows.get("p50_ms", OURS, way, 1)
        theirs = rows.get("p50_ms", constant + way, way, 1)
        more = None if ours is None or theirs is None else ours - theirs
        yield Bar(f"{label}: {way}, one connection, p50 - constant's, ms", more, most=0.15)
        p99, p50 = rows.get("p99_ms", OURS, way), rows.get("p50_ms", OURS, way)
        yield Bar(f"{label}: {way}, p99 / p50", _ratio(p99, p50), most=2.5)
    grpc = [rows.rate(OURS, "gRPC", *at) for at in ((64, 1), (8, 8))]
    best = [rows.rate("constant reply, grpcio*", "gRPC", *at) for at in ((64, 1), (8, 8))]
    for at, ours, theirs in zip(("64 x 1", "8 x 8"), grpc, best, strict=True):
        yield Bar(f"{label}: gRPC {at} / best constant grpcio", _ratio(ours, theirs), 0.6)
    stream = _ratio(rows.rate(OURS, "gRPC stream", 8), rows.rate(TRITON, "gRPC"))
    yield Bar(f"{label}: gRPC stream / Triton gRPC", stream, 1.0)


def _operated(name: str, found: Mapping[str, Any]) -> Iterator[Bar]:
    if name == "pauses":
        # What the machine pauses, it pauses a constant reply, too.
        ours, theirs = (found[f"{who}: max_ms"] for who in (OURS, "constant reply, protobuf"))
        yield Bar(
            "requests over 20 ms in the server, of 60 s", found["over_20_ms_in_the_server"], most=0
        )
        yield Bar("longest request in 60 s, for its client, ms", ours, most=20)
        yield Bar("longest request in 60 s - constant's, ms", ours - theirs, most=20)
    elif name == "workers":
        yield Bar("two workers / one on two cores, load included", found["two_of_one"], 1.0)
        lost, clients = found["lost_when_one_of_two_was_killed"], found["of_clients"]
        yield Bar("lost when one of two was killed / clients", lost / clients, most=1.0)
    elif name == "memory":
        yield Bar("private MB of a second server", max(found["private_mb"]), most=450)
    elif name == "overload":
        for way, figures in found.items():
            yield Bar(f"overload, {way}: goodput / peak", figures["goodput_of_peak"], 0.9)
            refused = figures["refused_p99_ms"]
            yield Bar(f"overload, {way}: 99 of 100 refusals within, ms", refused, most=20)
            first, second = (figures[f"memory_{half}_half_mb"] for half in ("first", "second"))
            yield Bar(f"overload, {way}: memory, second half / first", second / first, most=1.05)


def _large(label: str, rows: Rows, reference: Mapping[str, float]) -> Iterator[Bar]:
    for way, constant in (
        ("protobuf", rows.get("p50_ms", "constant reply, protobuf", "protobuf", 1)),
        ("gRPC", rows.get("p50_ms", "constant reply, grpcio*", "gRPC", 1)),
    ):
        ours = rows.get("p50_ms", OURS, way, 1)
        floor = None if constant is None else constant + reference["kernel"]
        yield Bar(f"{label}: {way}, p50 / (constant + kernel)", _ratio(ours, floor), most=1.3)
        theirs = rows.get("p50_ms", TRITON, "binary" if way == "protobuf" else "gRPC", 1)
        yield Bar(f"{label}: Triton's p50 / ours, {way}", _ratio(theirs, ours), 2.0)
    if label.startswith("bulk"):
        ratio = reference["engine"] / reference["kernel"]
        yield Bar(f"{label}: engine / bare kernel", ratio, most=1.15)
