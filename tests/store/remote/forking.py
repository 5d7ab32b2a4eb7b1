"""Runs code that is killed while it copies or pulls, in forks of a process that has imported
s3fs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import embedserve_store

ROOTS = (Path(embedserve_store.__file__).parents[1], Path(__file__).parents[2])

FORKS = """
import json, os, sys

import botocore.session
import s3fs
from botocore_models import cache_models

import embedserve_store.copying.copy_versions
import embedserve_store.model_store
import embedserve_store.remote.remote_store

cache_models()
keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
botocore.session.get_session().create_client("s3", region_name="us-east-1", **keys)
if os.listdir("/proc/self/task") != [str(os.getpid())]:
    raise RuntimeError("what forks has several threads: what is forked would lack them")
for line in sys.stdin:
    code, arguments, environment = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(2, 1)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = arguments
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forking:
    """A process that forks. It has imported the modules whose import takes longer than the code
    that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, code: str, *arguments: object) -> int:
        """Runs Python code in a fork that has this environment; returns its exit status.

        The status is negative if a signal ended the fork, as in subprocess. stderr is pytest's.
        """
        assert self._process.stdin
        assert self._process.stdout
        asked = code, [*map(str, arguments)], dict(os.environ)
        self._process.stdin.write(f"{json.dumps(asked)}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def start_forking() -> Iterator[Forking]:
    """Yields the forking process; ends it with the context."""
    path = os.pathsep.join(map(str, ROOTS))
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Forking(process)
