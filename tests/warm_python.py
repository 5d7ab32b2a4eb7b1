"""Python that has imported torch already: forked, where a start would import for seconds.

What is run so is a process as any other: a child of the one that asked, with its own pid,
arguments, environment, folder and files, and an end that wait() tells. What an interpreter reads
but once is not its own: -W ignore and OMP_NUM_THREADS=1 hold for all. What is about starting, or
about what is imported, is not to be run so.

As a script this is the process that forks. It has one thread, and starts when first asked.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

PYTHON = (sys.executable, "-W", "ignore")
"""What each command begins with: -m MODULE, -c CODE or a script and arguments follow."""
IMPORTED = (
    "torch.distributed.checkpoint",
    "embedserve.engine.restore",
    "embedserve_store.plans.planner",
)
"""With what these import."""
LENGTH_BYTES = 8
PR_SET_CHILD_SUBREAPER = 36
_ONE_AT_A_TIME = threading.Lock()


class WarmPopen(subprocess.Popen[Any]):
    """subprocess.Popen of PYTHON and what follows."""

    def _execute_child(self, args: Sequence[object], *others: Any) -> None:
        cwd, env = others[4:6]
        pipes = others[9:15]
        ends = (pipes[0], pipes[3], pipes[5])
        files = [own if end == -1 else end for own, end in enumerate(ends)]
        try:
            with _ONE_AT_A_TIME:
                self.pid = _forker().fork([str(part) for part in args], cwd, env, files)
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True


def run_warm(
    command: Sequence[str | Path], *, env: dict[str, str] | None = None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """subprocess.run(command, capture_output=True, text=True, …) of PYTHON and what follows."""
    pipe = subprocess.PIPE
    with WarmPopen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


class _Forker:
    """The process that forks, as the one that asks it sees it."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
        with theirs:
            self._process = subprocess.Popen(
                [*PYTHON, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment | {"OMP_NUM_THREADS": "1"},
            )

    def fork(
        self, args: list[str], cwd: str | None, env: dict[str, str] | None, files: list[int]
    ) -> int:
        if tuple(args[: len(PYTHON)]) != PYTHON:
            raise ValueError(f"is not run by {PYTHON}: {args}")
        environment = dict(os.environ if env is None else env)
        asked = (args[len(PYTHON) :], os.path.abspath(cwd or ""), environment)
        message = json.dumps(asked).encode()
        _adopt_orphans(True)
        try:
            socket.send_fds(self._channel, [len(message).to_bytes(LENGTH_BYTES)], files)
            self._channel.sendall(message)
            return int.from_bytes(_received(self._channel, LENGTH_BYTES))
        finally:
            _adopt_orphans(False)

    def end(self) -> None:
        self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        self._process.wait()


@cache
def _forker() -> _Forker:
    forker = _Forker()
    atexit.register(forker.end)
    return forker


def _adopt_orphans(is_wanted: bool) -> None:
    """Whether descendants whose parent ends become children of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _received(channel: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = channel.recv(length - len(received))
        if not part:
            raise EOFError("the process that forks, or the one that asks it, has ended")
        received += part
    return bytes(received)


def _fork_until_closed(channel: socket.socket) -> tuple[list[str], str]:
    """Returns in each process that it forks, with what that one is to run."""
    while True:
        head, files, _, _ = socket.recv_fds(channel, LENGTH_BYTES, 3)
        if not head:
            os._exit(0)
        args, cwd, env = json.loads(_received(channel, int.from_bytes(head)))
        told, tell = os.pipe()
        adopted, let_go = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(tell, pid.to_bytes(LENGTH_BYTES))
                os._exit(0)
            os.read(adopted, 1)
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, max(*files, told, tell, adopted, let_go, channel.detach()) + 1)
            os.environ.clear()
            os.environ.update(env)
            return args, cwd
        os.waitpid(between, 0)  # from now on its child is that of the process that asks
        os.write(let_go, b"!")
        channel.sendall(os.read(told, LENGTH_BYTES))
        for file in (*files, told, tell, adopted, let_go):
            os.close(file)


def _main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    installed = sys.path[1:]
    args, cwd = _fork_until_closed(socket.socket(fileno=int(sys.argv[1])))
    os.chdir(cwd)
    path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if args[0] == "-c":
        sys.path[:], sys.argv[:] = ["", *path, *installed], ["-c", *args[2:]]
        exec(compile(args[1], "<string>", "exec"), {"__name__": "__main__"})
    elif args[0] == "-m":
        sys.path[:], sys.argv[:] = [cwd, *path, *installed], args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:], sys.argv[:] = [os.path.dirname(args[0]), *path, *installed], args
        runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    _main()
