"""Redis with a row per key "table:row": MGET of a request's rows, which the client pools.

Many systems serve embeddings from Redis. The pooling, which is left to the client, is not measured.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator

import numpy as np
from workloads import Request, Workload

from servers.base import Server, Way

PROGRAMS = {"redis-server": "redis-server", "redis-cli": "redis-tools"}
ROWS_AT_ONCE = 1000


class Redis(Server):
    name = "Redis"
    ways = (Way("MGET", "redis", ""),)
    workloads = ("small",)
    ids = ("uniform",)  # redis-benchmark draws uniform keys only

    def missing(self) -> str:
        lacking = [package for name, package in PROGRAMS.items() if shutil.which(name) is None]
        return f"Debian's package {' and '.join(lacking)}" if lacking else ""

    def command(self, workload: Workload, port: int) -> list[str]:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1"]
        # Nothing is written to disk. One thread does all work, as by default.
        return [*command, "--save", "", "--appendonly", "no", "--io-threads", "1"]

    def prepare(self, workload: Workload, port: int) -> None:
        with subprocess.Popen(
            ["redis-cli", "-p", str(port), "--pipe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        ) as loading:
            assert loading.stdin is not None
            for commands in _sets(workload):
                loading.stdin.write(commands)
        request = workload.requests[0]
        rows = workload.tables.count * workload.tables.rows
        held = subprocess.check_output(["redis-cli", "-p", str(port), "DBSIZE"], text=True)
        if int(held) != rows:
            raise RuntimeError(f"Redis holds {held.strip()} of {rows} rows")
        workload.check(request, self._pooled(workload, request, port))

    def body(self, way: Way, workload: Workload, request: Request) -> bytes:
        """Returns as many keys as the request has rows, separated by spaces. redis-benchmark draws
        new rows for each MGET; fixed rows would stay in the processor's caches."""
        return b" ".join(key.rpartition(b":")[0] + b":__rand_int__" for key in _keys(request))

    def values(self, way: Way, workload: Workload, answer: bytes) -> np.ndarray:
        raise NotImplementedError("answers of MGET are rows; prepare() checks them")

    def _pooled(self, workload: Workload, request: Request, port: int) -> np.ndarray:
        """Pools the result of one MGET: float32 [1, tables * dim]."""
        keys = _keys(request)
        with socket.create_connection(("127.0.0.1", port)) as sock, sock.makefile("rwb") as file:
            file.write(_command(b"MGET", *keys))
            file.flush()
            assert file.readline() == b"*%d\r\n" % len(keys)
            rows = [file.read(int(file.readline()[1:]) + 2)[:-2] for _ in keys]
        values = [np.frombuffer(row, "<f4") for row in rows]
        pooled, start = [], 0
        for length in request.lengths.ravel():
            zeros = np.zeros((1, workload.tables.dim), np.float32)
            pooled.append(np.concatenate([zeros, *(v[None] for v in values[start:][:length])]))
            start += length
        return np.concatenate([rows.sum(axis=0) for rows in pooled])[None]


def _key(table: int, row: int) -> bytes:
    """Returns a key with a row of twelve digits, as redis-benchmark writes random numbers."""
    return b"%d:%012d" % (table, row)


def _keys(request: Request) -> list[bytes]:
    bags = enumerate(request.bags())
    return [_key(table, row) for table, feature in bags for bag in feature for row in bag]


def _sets(workload: Workload) -> Iterator[bytes]:
    for table, rows in enumerate(workload.tables.mapped):
        for start in range(0, len(rows), ROWS_AT_ONCE):
            yield b"".join(
                _command(b"SET", _key(table, start + i), row.tobytes())
                for i, row in enumerate(rows[start : start + ROWS_AT_ONCE])
            )


def _command(*words: bytes) -> bytes:
    """Encodes a command for Redis."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)
