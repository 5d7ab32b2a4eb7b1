"""Tests of Unix socket files: their permissions, listening sockets that are not replaced, and
removal."""

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


def expect_rejected(path: str, why: str) -> None:
    message = re.escape(f"cannot listen on unix:{path} (gRPC): ") + why
    with pytest.raises(OSError, match=f"^{message}$"):
        listen_at(path, 0o600, "gRPC")


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o222])
def test_socket_file_has_its_mode_and_is_removed_on_close(path: str, mode: int) -> None:
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


def test_socket_file_never_permits_more_than_its_mode(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the file before the bits that the umask removed are restored."""
    modes: list[int] = []
    monkeypatch.setattr(
        os, "chmod", lambda path, mode: modes.append(stat.S_IMODE(os.stat(path).st_mode))
    )
    before = os.umask(0)
    try:
        listen_at(path, 0o600, "HTTP").close()
    finally:
        os.umask(before)
    assert modes == [0o600]


def test_stale_socket_file_is_replaced(stale: str) -> None:
    listening = listen_at(stale, 0o600, "HTTP")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(stale)
    listening.close()


def test_relative_path_is_in_the_current_folder(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.path.dirname(path))
    listening = listen_at(os.path.basename(path), 0o600, "HTTP")
    assert os.path.exists(path)
    listening.close()
    assert not os.path.exists(path)


def test_socket_file_in_use_is_not_replaced(path: str) -> None:
    listening = listen_at(path, 0o600, "HTTP")
    expect_rejected(path, "Address already in use")
    listening.close()
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(path)
        full.listen(0)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            expect_rejected(path, "Address already in use")
    os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(path)
        expect_rejected(path, "Address already in use")


def test_files_that_are_no_sockets_are_not_replaced(tmp_path: Path, stale: str) -> None:
    file, link, folder = tmp_path / "file", tmp_path / "link", tmp_path / "folder"
    file.write_text("kept")
    link.symlink_to(stale)
    folder.mkdir()
    for one in (file, link, folder):
        expect_rejected(str(one), "a file is there that is no socket")
    assert file.read_text() == "kept"
    assert link.is_symlink()
    assert os.path.exists(stale)


def test_missing_folder_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "missing", tmp_path / "file"):
        expect_rejected(f"{folder}/embed.sock", f"there is no folder {folder}")


def test_path_that_the_system_rejects_is_named_in_the_error(tmp_path: Path) -> None:
    """Fails by the ResourceWarning of a socket that nobody has closed, too."""
    expect_rejected(str(tmp_path / ("s" * 120)), "AF_UNIX path too long")


def test_locked_folder_is_named_in_the_error(tmp_path: Path, path: str) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        expect_rejected(path, f"another process keeps the folder {tmp_path} locked")
    finally:
        os.close(held)


def test_only_one_of_many_concurrent_servers_gets_the_socket(stale: str) -> None:
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIM, stale],
            stdin=pipe,
            stdout=pipe,
            text=True,
            env=environment(),
        )
        for _ in range(8)
    ]
    for one in processes:
        assert one.stdin is not None
        one.stdin.write("1")
        one.stdin.flush()
    outputs = [one.stdout.readline().strip() for one in processes if one.stdout is not None]
    for one in processes:
        one.communicate(timeout=60)
    assert outputs.count("listens") == 1, outputs
    assert sum("Address already in use" in one for one in outputs) == len(processes) - 1, outputs


def test_closing_does_not_remove_the_socket_file_of_the_next_server(path: str) -> None:
    first = listen_at(path, 0o600, "HTTP")
    first.remove()
    second = listen_at(path, 0o600, "HTTP")
    first.close()
    assert os.path.exists(path)
    second.close()
    assert not os.path.exists(path)


def test_forked_process_does_not_remove_the_socket_file(path: str) -> None:
    done = run_python("-c", FORKED, path)
    assert (done.stdout, done.stderr) == ("True\nFalse\n", "")


def test_failed_claim_removes_the_other_socket_files(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sockets = [(path, 0o600, "HTTP"), (str(tmp_path / "file"), 0o600, "gRPC")]
    with pytest.raises(OSError, match="that is no socket"):
        claim_ports("127.0.0.1", 0, 0, unix=sockets)
    assert not os.path.exists(path)


def test_workers_share_a_socket_and_clients_wait_for_the_first_worker(path: str) -> None:
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
