"""The applier applies what is pushed, until its supervisor is gone."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from server.deltas.followed import Followed

from embedserve.config import ServeSettings
from embedserve.deltas.applier_process import run_applier
from embedserve.deltas.status import FollowedModel

WAIT_S_MAX = 30


@pytest.mark.parametrize("is_terminated", [False, True])
def test_pushed_rows_are_applied_until_the_end(tmp_path: Path, is_terminated: bool) -> None:
    followed = Followed(tmp_path / "store")
    followed.push(1)
    version = followed.models.load("m")
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        settings = ServeSettings(store=str(tmp_path / "store"), deltas="follow")
        model = FollowedModel(followed.live, followed.status)
        run_applier(settings, {"m": version}, {"m": model}, theirs)
    theirs.close()
    ours.settimeout(WAIT_S_MAX)
    assert ours.recv(1) == b"\n"
    assert followed.live.seq == 1
    followed.push(2)
    ends_s = time.monotonic() + WAIT_S_MAX
    while followed.live.seq < 2 and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert followed.status.read().applied.seq <= followed.live.seq == 2
    if is_terminated:
        os.kill(pid, signal.SIGTERM)
    else:
        ours.shutdown(socket.SHUT_RDWR)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGTERM if is_terminated else 0)
    ours.close()
