"""Tests of state that a server inherits from the process that starts it."""

import gc
from pathlib import Path

from server.fake_engine import FakeEngine
from server.live import live_server
from server.python import run_warm_python

SERVE = """
import os
import signal
import sys

from embedserve.config import ServeSettings
from embedserve.processes import serve

def serve_alone(*_):
    child = os.fork()
    if not child:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as whoever starts it may have it
serve._serve_alone = serve_alone
serve.serve(ServeSettings(sys.argv[1], http_port=0, grpc_port=0))
"""


def test_server_can_wait_for_children_even_if_sigchld_was_ignored(tmp_path: Path) -> None:
    done = run_warm_python("-c", SERVE, str(tmp_path))
    assert done.stdout == "7\n", done.stderr


async def test_server_collects_garbage_from_when_it_is_ready() -> None:
    gc.disable()  # as while models load
    try:
        async with live_server(FakeEngine()):
            assert gc.isenabled()
    finally:
        gc.enable()
