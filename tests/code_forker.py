"""A Python process that imports modules once, and forks for each piece of code that a test runs.

It imports less than forkserver, which starts whole commands and has torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from server.python import environment

FORKS = """
import json, os, sys
from quick_exit import QuickExit, keep_for_forks

end = QuickExit()
exec(sys.argv[1], {})
if os.listdir("/proc/self/task") != [str(os.getpid())]:
    raise RuntimeError("the process that forks has several threads, which its forks would lack")

def requested():
    for line in sys.stdin:
        code, arguments, environment, folder, files = json.loads(line)
        child = os.fork()
        if not child:
            os.chdir(folder)
            for number, file in enumerate([os.devnull, *files]):
                os.dup2(os.open(file, os.O_RDWR), number)
            if not files:  # the pipe of exit statuses is not for its output
                os.dup2(2, 1)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv[1:] = arguments
            return code
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()

keep_for_forks()
code = requested()
with end.status_of_block():
    exec(code, {"__name__": "__main__"})
"""


class CodeForker:
    """A process that forks. It has imported the modules whose import takes longer than the code
    that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, code: str, *arguments: object, files: Sequence[str] = ()) -> int:
        """Runs Python code to its end like ``start``, and returns its exit status like ``wait``."""
        self.start(code, *arguments, files=files)
        return self.wait()

    def start(self, code: str, *arguments: object, files: Sequence[str] = ()) -> int:
        """Starts Python code in a fork, with the folder and the environment of this process.

        Nothing else may be started before ``wait``.

        Args:
            files: paths of existing files for stdout and stderr; empty: both are pytest's stderr.

        Returns:
            The id of the forked process.
        """
        assert self._process.stdin
        assert self._process.stdout
        requested = code, [*map(str, arguments)], dict(os.environ), os.getcwd(), files
        self._process.stdin.write(f"{json.dumps(requested)}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def wait(self) -> int:
        """Returns the exit status, negative if a signal ended the fork, as in subprocess."""
        assert self._process.stdout
        return int(self._process.stdout.readline())


@contextmanager
def start_code_forker(preparation: str) -> Iterator[CodeForker]:
    """Yields the forking process, with the import path of this one; ends it with the context.

    Args:
        preparation: Python code that it runs before it forks.
    """
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, preparation],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield CodeForker(process)
        assert process.stdin
        process.stdin.close()
