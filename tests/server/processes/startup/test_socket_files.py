"""Tests of Unix socket files: their permissions, listening sockets that are not replaced, and
removal."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from server.python import environment, run_python

from embedserve.processes.startup.ports import claim_ports
from embedserve.processes.startup.socket_files import listen_at

CLAIM = """
import sys
from embedserve.processes.startup import socket_files
from embedserve.processes.startup.socket_files import listen_at
socket_files.LOCK_S_MAX = 60.0  # those that have it may be stopped for a while
sys.stdin.read(1)
try:
    listening = listen_at(sys.argv[1], 0o600, "HTTP")
except OSError as error:
    print(error, flush=True)
else:
    print("listens", flush=True)
    sys.stdin.read()
"""
FORKED = """
import os, sys
from embedserve.processes.startup.socket_files import listen_at
listening = listen_at(sys.argv[1], 0o600, "HTTP")
if not os.fork():
    listening.close()
    os._exit(0)
os.wait()
print(os.path.exists(sys.argv[1]))
listening.close()
print(os.path.exists(sys.argv[1]))
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "embed.sock")


@pytest.fixture
def stale(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
    return path


def refused(path: str, why: str) -> None:
    said = re.escape(f"cannot listen on unix:{path} (gRPC): ") + why
    with pytest.raises(OSError, match=f"^{said}$"):
        listen_at(path, 0o600, "gRPC")


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o222])
def test_who_may_write_to_the_file_may_connect(path: str, mode: int) -> None:
    before = os.umask(0o077)
    try:
        listening = listen_at(path, mode, "HTTP")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == mode
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        listening.sock.accept()[0].close()
    listening.close()
    assert not os.path.exists(path)


def test_a_file_that_a_killed_server_left_is_replaced(stale: str) -> None:
    listening = listen_at(stale, 0o600, "HTTP")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(stale)
    listening.close()


def test_one_that_somebody_listens_on_is_not(path: str) -> None:
    listening = listen_at(path, 0o600, "HTTP")
    refused(path, "Address already in use")
    listening.close()
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(path)
        full.listen(0)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            refused(path, "Address already in use")
    os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(path)
        refused(path, "Address already in use")


def test_what_is_no_socket_is_left_alone(tmp_path: Path, stale: str) -> None:
    file, link, folder = tmp_path / "file", tmp_path / "link", tmp_path / "folder"
    file.write_text("kept")
    link.symlink_to(stale)
    folder.mkdir()
    for one in (file, link, folder):
        refused(str(one), "a file is there that is no socket")
    assert file.read_text() == "kept"
    assert link.is_symlink()
    assert os.path.exists(stale)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "missing", tmp_path / "file"):
        refused(f"{folder}/embed.sock", f"there is no folder {folder}")


def test_a_folder_that_somebody_keeps_locked_is_named(tmp_path: Path, path: str) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        refused(path, f"another process keeps the folder {tmp_path} locked")
    finally:
        os.close(held)


def test_of_many_that_start_together_one_has_it(stale: str) -> None:
    pipe = subprocess.PIPE
    many = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIM, stale],
            stdin=pipe,
            stdout=pipe,
            text=True,
            env=environment(),
        )
        for _ in range(8)
    ]
    for one in many:
        assert one.stdin is not None
        one.stdin.write("1")
        one.stdin.flush()
    said = [one.stdout.readline().strip() for one in many if one.stdout is not None]
    for one in many:
        one.communicate(timeout=60)
    assert said.count("listens") == 1, said
    assert sum("Address already in use" in one for one in said) == len(many) - 1, said


def test_the_file_of_the_next_server_stays(path: str) -> None:
    first = listen_at(path, 0o600, "HTTP")
    first.remove()
    second = listen_at(path, 0o600, "HTTP")
    first.close()
    assert os.path.exists(path)
    second.close()
    assert not os.path.exists(path)


def test_who_was_forked_does_not_remove_it(path: str) -> None:
    done = run_python("-c", FORKED, path)
    assert (done.stdout, done.stderr) == ("True\nFalse\n", "")


def test_ports_give_all_back_where_one_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wanted = [(path, 0o600, "HTTP"), (str(tmp_path / "file"), 0o600, "gRPC")]
    with pytest.raises(OSError, match="that is no socket"):
        claim_ports("127.0.0.1", 0, 0, unix=wanted)
    assert not os.path.exists(path)


def test_workers_share_one_and_callers_wait_for_the_first(path: str) -> None:
    shared = claim_ports("127.0.0.1", 0, 0, unix=[(path, 0o600, "HTTP")]).share()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        workers = [shared.bind() for _ in range(2)]
        assert workers[0].unix == workers[1].unix
        workers[1].unix[0].sock.accept()[0].close()
    for worker in workers:
        for sock in worker.sockets:
            sock.close()
    shared.close()
    assert not os.path.exists(path)
