"""A Python process that has imported the command line and the store, but no torch, and forks for
each command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.python import environment

FORK = """
import json, os, sys
import embedserve.commands.cli, embedserve.commands.planning.plan
from typer import _adapters  # imported when arguments are parsed

def asked():
    for line in sys.stdin:
        code, folder, *files = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)
            for number, file in enumerate((os.devnull, *files)):
                os.dup2(os.open(file, os.O_RDWR), number)
            return code
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.exit()

exec(asked(), {"__name__": "__main__"})
"""


class LightPython:
    """Runs code like ``python -c``, with the command line and the store already imported."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._files = [folder / "stdout", folder / "stderr"]

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        """Runs ``code`` in this process's folder; returns the exit status and the output."""
        for file in self._files:
            file.write_text("")
        asked = [code, os.getcwd(), *map(str, self._files)]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess([], status, *[one.read_text() for one in self._files])


@contextmanager
def light_python() -> Iterator[LightPython]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", FORK]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment(), text=True) as process,
    ):
        yield LightPython(process, Path(folder))
        assert process.stdin is not None
        process.stdin.close()
