"""Helpers of the examples: run commands visibly, and run servers in the background."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

READY_S_MAX = 300.0
STOPPED_S_MAX = 60.0


def module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-W", "ignore", "-m", name)


EMBEDSERVE = module("embedserve")


def shown(command: tuple[object, ...]) -> list[str]:
    """Returns the words of ``command`` and prints it as a user would type it."""
    words = [*map(str, command)]
    typed = shlex.join(words).replace(shlex.join(EMBEDSERVE), "embedserve")
    print(f"+ {typed.replace(shlex.join(module('')[:-1]), 'python -m')}", flush=True)
    return words


def run(*command: object) -> None:
    """Runs ``command`` to its end; exits with its status if it fails."""
    if status := subprocess.run(shown(command), check=False).returncode:
        sys.exit(status)


@contextmanager
def started(*command: object, ready: str) -> Iterator[None]:
    """Runs a server during the block, which starts once the URL ``ready`` responds."""
    process = subprocess.Popen(shown(command))
    try:
        _wait_until_ready(process, ready)
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOPPED_S_MAX)
        finally:
            process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], ready: str) -> None:
    end_s = time.monotonic() + READY_S_MAX
    while time.monotonic() < end_s:
        if process.poll() is not None:
            sys.exit(f"a server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(ready, timeout=5):
                if process.poll() is None:  # otherwise another server responds on its port
                    return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"{ready} does not answer")
