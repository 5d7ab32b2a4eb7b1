"""A fork server for Python processes that need torch, whose import takes seconds.

A forked process behaves like any other. It is a child of the process that requested it, with its
own pid, arguments, environment, folder and files. ``wait()`` returns its exit status. Settings that
an interpreter reads only once are common to all processes: -W ignore and OMP_NUM_THREADS=1. Tests
of start-up or of imports must start Python normally.

As a script this module is the fork server. It has one thread, and starts at the first request. It
also compiles a lookup, so that forked processes do not repeat the work that TorchScript does for
the first one.
"""

import atexit
import ctypes
import importlib
import json
import logging
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quick_exit import QuickExit, keep_for_forks

PYTHON = (sys.executable, "-W", "ignore")
"""The start of each command. "-m MODULE", "-c CODE" or a script follows, then arguments."""
IMPORTED = (
    "torch.distributed.checkpoint",
    "embedserve.commands.cli",
    "embedserve_store.commands.publish",
    "embedserve.engine.restore",
    "embedserve.processes.rollout.agent",
    "embedserve.processes.serve",
    "embedserve.processes.single_process",
    "embedserve.processes.worker",
    "embedserve_store.plans.planner",
    "numpy.ma",
    "pydantic.v1",
    "rich._emoji_codes",
    "rich.progress",
    "rich.status",
    "typer._click.decorators",
    "uvloop",
)
"""Modules that the fork server imports, with their own imports.

The server, torchrec or another library imports the last ones only when they are used."""
NOT_FOR_ALL = ("COLUMNS", "PYTHONHASHSEED", "PYTHONPATH")
"""Environment variables that must not be inherited from the process that starts the fork server.

The interpreter or an imported module reads them only once."""
LENGTH_BYTES = 8
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS = 0x20000
MADV_COLLAPSE = 25
HUGE_PAGE_BYTES = 2 << 20
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class ForkRequest:
    """A process to fork.

    Attributes:
        is_session: whether the process leads a session of its own.
        has_forker: whether the process has a fork server of its own, which started_forker() of
            this module returns in it.
        has_warm_children: whether children that it starts with PYTHON and subprocess are forked,
            too.
        mounts: path of the mount namespace that the process enters, as in /proc/PID/ns; "" for
            none.
    """

    args: list[str]
    cwd: str
    env: dict[str, str]
    is_session: bool
    has_forker: bool
    has_warm_children: bool
    mounts: str


class WarmPopen(subprocess.Popen[Any]):
    """subprocess.Popen for a forked process.

    The command begins with PYTHON. ForkRequest describes the other arguments.
    """

    def __init__(
        self,
        args: Any,
        *others: Any,
        has_forker: bool = False,
        has_warm_children: bool = False,
        mounts: str = "",
        **options: Any,
    ) -> None:
        self._has_forker = has_forker
        self._has_warm_children = has_warm_children
        self._mounts = mounts
        super().__init__(args, *others, **options)

    def _execute_child(self, args: Sequence[object], *others: Any) -> None:
        cwd, env = others[4:6]
        pipes = others[9:15]
        ends = (pipes[0], pipes[3], pipes[5])
        files = [own if end == -1 else end for own, end in enumerate(ends)]
        fork_request = ForkRequest(
            [str(part) for part in args],
            os.path.abspath(cwd or ""),
            dict(os.environ if env is None else env),
            is_session=bool(others[20]),
            has_forker=self._has_forker or self._has_warm_children,
            has_warm_children=self._has_warm_children,
            mounts=self._mounts,
        )
        try:
            with _ONE_AT_A_TIME:
                self.pid = started_forker().fork(fork_request, files)
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True


def run_warm(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float,
    has_warm_children: bool = False,
    mounts: str = "",
) -> subprocess.CompletedProcess[str]:
    """Runs a forked process like ``subprocess.run(command, capture_output=True, text=True, …)``.

    The command begins with PYTHON.
    """
    pipe = subprocess.PIPE
    with WarmPopen(
        command,
        has_warm_children=has_warm_children,
        mounts=mounts,
        cwd=cwd,
        env=env,
        stdout=pipe,
        stderr=pipe,
        text=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


class Forker:
    """The client side of the fork server."""

    def __init__(self, channel: socket.socket, wait: Callable[[], object]) -> None:
        self._channel = channel
        self._wait = wait
        atexit.register(self._end)

    def fork(self, fork_request: ForkRequest, files: list[int]) -> int:
        """Forks a process that becomes a child of this one, and returns its pid."""
        if tuple(fork_request.args[: len(PYTHON)]) != PYTHON:
            raise ValueError(f"is not run by {PYTHON}: {fork_request.args}")
        message = json.dumps(vars(fork_request)).encode()
        _adopt_orphans(True)
        try:
            socket.send_fds(self._channel, [len(message).to_bytes(LENGTH_BYTES)], files)
            self._channel.sendall(message)
            return int.from_bytes(received(self._channel, LENGTH_BYTES))
        finally:
            _adopt_orphans(False)

    def _end(self) -> None:
        self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        self._wait()


@cache
def started_forker() -> Forker:
    """Starts the fork server of this process."""
    channel, theirs = socket.socketpair()
    environment = {name: os.environ[name] for name in os.environ if name not in NOT_FOR_ALL}
    with theirs:
        process = subprocess.Popen(
            [*PYTHON, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment | {"OMP_NUM_THREADS": "1", "TERM": "dumb"},
        )
    return Forker(channel, process.wait)


def _adopt_orphans(is_wanted: bool) -> None:
    """Sets whether orphaned descendants become children of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def received(channel: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = channel.recv(length - len(received))
        if not part:
            raise EOFError("the process that forks, or the one that asks it, has ended")
        received += part
    return bytes(received)


def _fork_until_closed(channel: socket.socket) -> ForkRequest:
    """Forks a process per request. Returns only in the forked processes, with their description."""
    while True:
        head, files, _, _ = socket.recv_fds(channel, LENGTH_BYTES, 3)
        if not head:
            os._exit(0)
        fork_request = ForkRequest(**json.loads(received(channel, int.from_bytes(head))))
        pid_reader, pid_writer = os.pipe()
        adopted, let_go = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(pid_writer, pid.to_bytes(LENGTH_BYTES))
                os._exit(0)
            os.read(adopted, 1)
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(
                3, max(*files, pid_reader, pid_writer, adopted, let_go, channel.detach()) + 1
            )
            if fork_request.is_session:
                os.setsid()
            if fork_request.mounts:
                _enter(fork_request.mounts)
            os.environ.clear()
            os.environ.update(fork_request.env)
            return fork_request
        os.waitpid(between, 0)  # from now on its child belongs to the process that sent the request
        os.write(let_go, b"!")
        channel.sendall(os.read(pid_reader, LENGTH_BYTES))
        for file in (*files, pid_reader, pid_writer, adopted, let_go):
            os.close(file)


def _enter(mounts: str) -> None:
    """Enters a mount namespace. The kernel allows that only to single-threaded processes."""
    with open(mounts) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "setns", mounts)


def _next_forked(channel: socket.socket) -> ForkRequest:
    """Returns in each forked process, with its description.

    A process that has a fork server forks it here, before it has any threads.
    """
    global started_forker
    fork_request = _fork_until_closed(channel)
    if fork_request.has_forker:
        channel, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            channel.close()
            return _next_forked(theirs)
        theirs.close()
        forker = Forker(channel, lambda: os.waitpid(pid, 0))
        started_forker = cache(lambda: forker)
    return fork_request


def _fork_what_this_starts() -> None:
    """Makes subprocess fork the PYTHON processes that this process starts."""
    plain = subprocess.Popen

    class Popen(WarmPopen):
        def _execute_child(self, args: Any, *others: Any) -> None:
            is_python = isinstance(args, list | tuple) and tuple(args[: len(PYTHON)]) == PYTHON
            kind: Any = WarmPopen if is_python else plain
            kind._execute_child(self, args, *others)

    subprocess.Popen = Popen  # type: ignore[misc]


def _compile_lookups() -> None:
    """Compiles lookups as a server does: one for a model on one rank, and one for two ranks."""
    import torch
    from torchscript import cache_definitions

    from embedserve.engine.restore import restore
    from embedserve_store import ModelStore, TableSpec, publish
    from embedserve_store.terminal.console import hush_torch

    hush_torch()
    cache_definitions()
    rows = {"embedding_bags.t.weight": torch.ones(8, 4)}
    tables = [TableSpec("t", 8, 4, ("f",), "sum", "float32")]
    with tempfile.TemporaryDirectory() as store:
        for ranks, sharding in ((1, "table_wise"), (2, "row_wise")):
            publish(rows, store, model=sharding, tables=tables, sharding=sharding, world_size=ranks)
            restore(ModelStore(store).load(sharding), "cpu")
    logging.getLogger().handlers.clear()  # added when torchrec logs


def _build_command_line() -> None:
    """Makes typer build the click commands of the app, and their argument converters, only once."""
    from typer import main

    from embedserve.commands import cli

    module: Any = main
    module.get_command = cache(main.get_command)
    cli.command_line = lambda called="": cli.app
    _build_parameters(module.get_command(cli.app))


def _build_parameters(command: Any) -> None:
    for parameter in command.params:
        if hasattr(parameter, "get_runtime_param"):  # not in every version of typer
            parameter.get_runtime_param()
    for one in getattr(command, "commands", {}).values():
        _build_parameters(one)


def _collapse_memory() -> None:
    """Moves this process's memory to huge pages, which makes each fork four times cheaper.

    A fork copies the page table, and the exit of the forked process frees the copy. The table of
    300 MB has 80,000 entries for small pages. Kernels before Linux 6.1 keep the small pages.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        if permissions == "rw-p":
            start, end = (int(one, 16) for one in addresses.split("-"))
            first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            if first + HUGE_PAGE_BYTES <= end:
                madvise(first, (end - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, MADV_COLLAPSE)


def _main() -> None:
    end = QuickExit()
    for name in IMPORTED:
        importlib.import_module(name)
    _build_command_line()
    try:
        _compile_lookups()
    except Exception:  # other tests report the error
        traceback.print_exc()
    if os.listdir("/proc/self/task") != [str(os.getpid())]:
        raise RuntimeError("what forks has several threads: what is forked would lack them")
    keep_for_forks()
    _collapse_memory()
    installed = sys.path[1:]
    fork_request = _next_forked(socket.socket(fileno=int(sys.argv[1])))
    if fork_request.has_warm_children:
        _fork_what_this_starts()
    with end.status_of_block():
        _run(fork_request, installed)


def _run(fork_request: ForkRequest, installed: list[str]) -> None:
    os.chdir(fork_request.cwd)
    args = fork_request.args[len(PYTHON) :]
    path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if args[0] == "-c":
        sys.path[:], sys.argv[:] = ["", *path, *installed], ["-c", *args[2:]]
        exec(compile(args[1], "<string>", "exec"), {"__name__": "__main__"})
    elif args[0] == "-m":
        sys.path[:], sys.argv[:] = [fork_request.cwd, *path, *installed], args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:], sys.argv[:] = [os.path.dirname(args[0]), *path, *installed], args
        runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    import forkserver  # so that forked processes import what is imported here, as they have forks

    forkserver._main()
