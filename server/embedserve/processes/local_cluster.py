"""`embedserve cluster`: the shards and the router of a store's models, as processes of this host.

Each child is an `embedserve serve`, or with Ray the process that places the shards there. It
reports over sd_notify when it is ready. This process starts the shards, then the router, and starts
again what ends. It never imports torch.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

from embedserve.config import ServeSettings
from embedserve.config_checks import check_settings
from embedserve.file_reloader import named_in_errors
from embedserve.model_names import split_name
from embedserve.processes.cluster_child import HOST, Child, held_ports, report
from embedserve.processes.cluster_settings import ClusterSettings
from embedserve.processes.forked import describe_exit
from embedserve.processes.model_loading import check_names, load_named
from embedserve.processes.ray_backend.connection import (
    PYTHON,
    check_address,
    check_installed,
    check_shards_name,
)
from embedserve.processes.ray_backend.placement import PlacementSettings
from embedserve.processes.signals import wake_on_signals
from embedserve.shard_client.discovery import write_shards
from embedserve_store import StoreError
from embedserve_store.parts.part import NO_ROWS
from embedserve_store.remote.remote_store import is_url
from embedserve_store.terminal.sizes import parse_bytes
from embedserve_store.terminal.stores import opened

LOCAL, RAY = "local", "ray"
POLL_S = 1.0
"""Seconds between two checks of the children, if no signal or output comes before."""
STOP_S_MAX = 15.0
"""Seconds for children to drain after SIGTERM, before they are killed; `serve` drains for 10 s."""
OUTPUT_BYTES = 1 << 16


class ChildFailedError(ChildProcessError):
    """A child ended with an error before the cluster was ready."""


class LocalCluster:
    """Starts and watches the children, until SIGTERM or SIGINT."""

    def __init__(
        self, shards: Sequence[Child], router: Child, on_new_address: Callable[[], None]
    ) -> None:
        """
        Args:
            on_new_address: called when a shard has another address. Called again if it raises
                OSError.
        """
        self._shards, self._router, self._on_new_address = shards, router, on_new_address
        self._all = [*shards, router]
        self._selector = selectors.DefaultSelector()
        self._stops = 0
        self._is_reload_requested = False
        self._has_new_address = False
        self._problem = ""  # why the new address was not passed on

    def run(self, folder: Path) -> None:
        """Runs the cluster; ``folder`` is for its sockets.

        Raises:
            ChildFailedError: a child ended with an error before the router was ready.
        """
        with ExitStack() as stack:
            stack.callback(self._selector.close)
            stack.enter_context(wake_on_signals(self._selector, self._stop, self._reload))
            sockets = {}
            for index, child in enumerate(self._all):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                sockets[child] = str(folder / f"{index}.sock")
                with named_in_errors(f"TMPDIR ({folder})"):
                    sock.bind(sockets[child])
                self._selector.register(sock, selectors.EVENT_READ, partial(child.receive, sock))
            stack.callback(self._stop_all)
            while not self._stops:
                self._start_due_children(sockets)
                self._pass_on_addresses()
                self._step(self._wait_s())

    def _stop(self) -> None:
        self._stops += 1

    def _reload(self) -> None:
        self._is_reload_requested = True

    def _start_due_children(self, sockets: dict[Child, str]) -> None:
        due: Sequence[Child] = self._shards
        if all(shard.was_ready for shard in self._shards):
            due = self._all
        for child in due:
            if child.process is None and time.monotonic() >= child.restarts.at_s:
                try:
                    output = child.start(sockets[child])
                except OSError as error:
                    if not self._router.was_ready:
                        raise
                    delay_s = child.on_end(time.monotonic())
                    report(
                        f"{child.name} cannot start: {error}; it is tried again in {delay_s:g} s"
                    )
                    continue
                if output is not None:
                    self._forward(child, output)
                    self._has_new_address = True

    def _pass_on_addresses(self) -> None:
        """Calls ``on_new_address`` if a shard has another address.

        Raises:
            OSError: the call failed, and the router was never ready.
        """
        if not self._has_new_address:
            return
        try:
            self._on_new_address()
        except OSError as error:
            if not self._router.was_ready:
                raise
            if str(error) != self._problem:
                report(f"the addresses of the shards cannot be written: {error}; it is tried again")
            self._problem = str(error)
        else:
            self._has_new_address, self._problem = False, ""

    def _forward(self, child: Child, output: IO[bytes]) -> None:
        """Writes the lines of ``output`` to stderr, each after the name of ``child``."""
        prefix, pending = f"{child.name}: ".encode(), bytearray()

        def read() -> None:
            chunk = os.read(output.fileno(), OUTPUT_BYTES)
            pending.extend(chunk or (b"\n" if pending else b""))
            *lines, rest = pending.split(b"\n")
            pending[:] = rest
            with suppress(OSError):  # as in report
                for line in lines:
                    sys.stderr.buffer.write(prefix + line + b"\n")
                sys.stderr.flush()
            if not chunk:
                self._selector.unregister(output)
                output.close()

        self._selector.register(output, selectors.EVENT_READ, lambda _: read())

    def _step(self, wait_s: float) -> None:
        """Waits for output, a report or a signal, and handles it. Notes which children ended."""
        self._handle_events(wait_s)
        if self._is_reload_requested:
            self._is_reload_requested = False
            for child in self._all:
                child.signal(signal.SIGHUP, only_ready=True)
        for child in self._all:
            if child.process is not None and (code := child.process.poll()) is not None:
                self._on_end(child, code)

    def _handle_events(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            key.data(key)

    def _wait_s(self) -> float:
        """Returns the seconds until a child that ended may be started again, at most POLL_S."""
        now_s = time.monotonic()
        ended = [child for child in self._all if child.process is None and child.restarts.at_s]
        return max(0.0, min([POLL_S, *(child.restarts.at_s - now_s for child in ended)]))

    def _on_end(self, child: Child, code: int) -> None:
        delay_s = child.on_end(time.monotonic())
        if self._stops:
            return
        if code > 0 and not self._router.was_ready:
            raise ChildFailedError(f"{child.name} {describe_exit(code)} before it was ready")
        when = f"in {delay_s:g} s" if delay_s else "now"
        report(f"{child.name} {describe_exit(code)}; it starts again {when}")

    def _stop_all(self) -> None:
        """Ends the router, then the shards that it may call until then."""
        self._stops = max(1, self._stops)
        for children in ([self._router], self._shards):
            end_s = time.monotonic() + STOP_S_MAX
            for child in children:
                child.signal(signal.SIGTERM)
                child.signal(signal.SIGCONT)  # a stopped process would not end
            while any(child.process is not None for child in children):
                if time.monotonic() >= end_s or self._stops > 1:
                    for child in children:
                        child.signal(signal.SIGKILL)
                self._step(POLL_S)
        self._handle_events(0)  # their last lines


def run_cluster(settings: ClusterSettings) -> None:
    """Runs a cluster until SIGTERM or SIGINT.

    Raises:
        StoreError: a model cannot be read, or has no parts.
        OSError: a port cannot be bound, or a child failed before the cluster was ready.
        ValueError: a setting is invalid.
    """
    check_settings(ServeSettings(settings.store, follow=settings.follow))
    _check_backend(settings)
    if settings.backend == RAY:  # whose processes run in other folders
        settings = replace(
            settings,
            store=_absolute(settings.store),
            cache=_absolute(settings.cache),
            shard_config=_absolute(settings.shard_config),
        )
    parts = read_parts(settings)
    with (
        held_ports(HOST, settings.http_port, settings.grpc_port),  # reports a port in use now
        tempfile.TemporaryDirectory(prefix="embedserve-cluster-") as folder,
    ):
        path = Path(folder) / "shards.json"
        router = Child("router", _router_arguments(settings, path))
        if settings.backend == RAY:
            placement = Child("the process that places shards", _placed(settings, parts, path))
            LocalCluster([placement], router, lambda: None).run(Path(folder))
            return
        shards = [
            [_shard(settings, part, parts, replica) for replica in range(settings.replicas)]
            for part in range(parts)
        ]

        def write_addresses() -> None:
            found = [[one.address for one in replicas if one.address] for replicas in shards]
            write_shards(path, found)

        LocalCluster([*chain.from_iterable(shards)], router, write_addresses).run(Path(folder))


def _check_backend(settings: ClusterSettings) -> None:
    """Raises ValueError if the backend cannot be used, and OSError if Ray cannot be reached."""
    if settings.backend not in (LOCAL, RAY):
        raise ValueError(f"backend is {settings.backend!r}, expected {LOCAL} or {RAY}")
    if settings.backend == RAY:
        check_shards_name(settings.name)
        check_installed()
        _memory_bytes(settings)
        check_address(settings.ray_address)
        return
    for name in ("name", "shard_memory"):
        if (value := getattr(settings, name)) != getattr(ClusterSettings, name):
            raise ValueError(f"{name} is {value!r}, but backend is {LOCAL}: it is for {RAY} only")


def _memory_bytes(settings: ClusterSettings) -> int:
    """Returns the bytes that a shard reserves in Ray; 0: none. Raises ValueError."""
    memory = settings.shard_memory
    return parse_bytes(memory, "shard_memory") if memory else 0


def _absolute(path: str) -> str:
    """Returns a path that means the same in every folder; a URL and "" are returned as they are."""
    return path if not path or is_url(path) else str(Path(path).absolute())


def read_parts(settings: ClusterSettings) -> int:
    """Returns the number of parts of the models; raises StoreError if they have none, or differ."""
    check_names(settings.model)
    counts: dict[str, int] = {}
    with opened(settings.store, settings.cache, NO_ROWS) as store:
        for name in settings.model or store.models():
            hosts = load_named(store, name).plan.hosts
            assert hosts is not None  # the store was opened as for a router
            counts[name] = hosts.parts
    if not counts:
        raise StoreError(f"{settings.store}: no model in this store; publish one first")
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise StoreError(f"numbers of parts differ: {shown}; choose models with --model")
    return min(counts.values())


def _shard(settings: ClusterSettings, part: int, parts: int, replica: int) -> Child:
    name = f"part {part}" if settings.replicas == 1 else f"part {part} replica {replica}"
    arguments = [sys.executable, *_shard_arguments(settings, part, parts)]
    return Child(name, arguments, shard_host=HOST, is_piped=True)


def _placed(settings: ClusterSettings, parts: int, path: Path) -> list[str]:
    """Returns the command of the process that places the shards in Ray."""
    placed = PlacementSettings(
        settings.name,
        settings.ray_address,
        str(path),
        [_shard_arguments(settings, part, parts) for part in range(parts)],
        settings.replicas,
        _memory_bytes(settings),
    )
    return [*PYTHON, "place", json.dumps(asdict(placed))]


def _shard_arguments(settings: ClusterSettings, part: int, parts: int) -> list[str]:
    # Without an alias, which may move: a shard holds the versions that any alias names.
    names = [one if split_name(one)[1].isdigit() else split_name(one)[0] for one in settings.model]
    follow = "none" if settings.follow == "none" else "latest"
    own = ["--part", f"{part}/{parts}", "--devices", "cpu", "--follow", follow]
    own += ["--config", settings.shard_config] if settings.shard_config else []
    return _serve_arguments(settings, list(dict.fromkeys(names)), own)


def _router_arguments(settings: ClusterSettings, addresses: Path) -> list[str]:
    ports = ["--http-port", str(settings.http_port), "--grpc-port", str(settings.grpc_port)]
    timeout = ["--shard-timeout-ms", str(settings.shard_timeout_ms)]
    own = ["--shards", f"file:{addresses}", "--follow", settings.follow, *timeout, *ports]
    own += ["--config", settings.router_config] if settings.router_config else []
    return [sys.executable, *_serve_arguments(settings, settings.model, own)]


def _serve_arguments(settings: ClusterSettings, names: Sequence[str], own: list[str]) -> list[str]:
    """Returns the arguments of Python that run `serve`."""
    # Warnings of imported packages would appear once for each child.
    arguments = ["-W", "ignore", "-m", "embedserve", "serve", settings.store]
    for name in names:
        arguments += ["--model", name]
    return [*arguments, *own, *(["--cache", settings.cache] if settings.cache else [])]
