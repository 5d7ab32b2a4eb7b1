"""`serve --grpc-server pyvoy`: the same server in an Envoy, its errors, and its ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from servers import Running, command, free_port, run_command, running

from embedserve_client import EmbedClient, GrpcEmbedClient, InvalidRequest

DESCRIPTION = """
tables:
  - {name: user, num_embeddings: 500, embedding_dim: 8, feature_names: [user], pooling: sum}
  - {name: shop, num_embeddings: 90, embedding_dim: 4, feature_names: [shop], pooling: mean}
"""
PYVOY = ("--grpc-server", "pyvoy")
END_S_MAX = 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pyvoy")
    random = torch.Generator().manual_seed(0)
    weights = {
        "embedding_bags.user.weight": torch.randn(500, 8, generator=random),
        "embedding_bags.shop.weight": torch.randn(90, 4, generator=random),
    }
    torch.save(weights, folder / "model.pt")
    (folder / "tables.yaml").write_text(DESCRIPTION)
    done = run_command(
        "publish", folder / "model.pt", folder / "tables.yaml", folder / "store", "--model", "m"
    )
    assert done.returncode == 0, done.stderr
    return folder / "store"


def children(process: subprocess.Popen[bytes]) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def until_gone(pid: int) -> None:
    end = time.monotonic() + END_S_MAX
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, f"process {pid} lives on"
        time.sleep(0.01)


def policies(pid: int) -> set[int]:
    """How the threads of a process are scheduled."""
    return {os.sched_getscheduler(int(one.name)) for one in Path(f"/proc/{pid}/task").iterdir()}


def is_listening(target: str) -> bool:
    host, port = target.rsplit(":", 1)
    with socket.socket() as sock:
        return sock.connect_ex((host.removeprefix("http://"), int(port))) == 0


def folders() -> set[Path]:
    """Of Envoy's admin sockets."""
    return set(Path(tempfile.gettempdir()).glob("embedserve-*"))


def test_rest_and_grpc_answer_the_same_and_nothing_is_left_behind(store, tmp_path) -> None:
    before = folders()
    with running(store, tmp_path / "log", *PYVOY) as server:
        (envoy,) = children(server.process)
        answers = []
        for client in (EmbedClient(server.http), GrpcEmbedClient(server.grpc)):
            with client:
                answers.append(client.embed({"user": [[1, 2], [499]], "shop": [[3, 4, 5], []]}))
                with pytest.raises(InvalidRequest, match=r"features\.user\[0\]\[0\] is 500"):
                    client.embed({"user": [[500]]})
        assert policies(envoy) == {os.SCHED_BATCH}
        rest, grpc = answers
        assert np.array_equal(rest.values, grpc.values)
        assert rest.values.any()
        assert len(folders() - before) == 1
        (folder,) = folders() - before
        assert folder.stat().st_mode & 0o077 == 0
        server.process.terminate()
        assert server.process.wait(END_S_MAX) == 0
    until_gone(envoy)
    assert folders() == before
    log = (tmp_path / "log").read_text()
    assert "gRPC 127.0.0.1" in log
    assert "Traceback" not in log


def test_a_server_whose_parent_is_killed_ends(store, tmp_path) -> None:
    before = folders()
    with running(store, tmp_path / "log", *PYVOY) as server:
        (envoy,) = children(server.process)
        server.process.kill()
        server.process.wait(END_S_MAX)
        until_gone(envoy)
        assert not is_listening(server.http)
        assert not is_listening(server.grpc)
    assert folders() == before


def test_a_server_that_is_stopped_while_it_loads_ends_at_once(store, tmp_path) -> None:
    ports = ("--http-port", free_port(), "--grpc-port", free_port())
    process = subprocess.Popen(command("serve", store, *ports, *PYVOY), stderr=subprocess.DEVNULL)
    end = time.monotonic() + END_S_MAX
    while not children(process):
        assert time.monotonic() < end
        time.sleep(0.01)
    (envoy,) = children(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_S_MAX) == 128 + signal.SIGTERM
    until_gone(envoy)


def test_a_server_that_is_killed_is_told_of(store, tmp_path) -> None:
    with running(store, tmp_path / "log", *PYVOY) as server:
        (envoy,) = children(server.process)
        os.kill(envoy, signal.SIGKILL)
        assert server.process.wait(END_S_MAX) == 128 + signal.SIGKILL
    assert "process was ended by SIGKILL" in (tmp_path / "log").read_text()


def refused(store: Path, *arguments: object) -> str:
    done = run_command("serve", store, *arguments, *PYVOY)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_what_is_wrong_is_one_line(store, tmp_path) -> None:
    ports = ("--http-port", free_port(), "--grpc-port", free_port())
    assert "devices is 'tpu'" in refused(store, *ports, "--devices", "tpu")
    assert "workers is 2: with grpc_server pyvoy" in refused(store, *ports, "--workers", "2")
    assert "no model 'n', there are m" in refused(store, *ports, "--model", "n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(store, "--http-port", free_port(), "--grpc-port", port)
    assert line.startswith(f"embedserve: cannot listen on 127.0.0.1:{port} (gRPC)")
    done = run_command("serve", store, "--grpc-server", "nginx")
    assert "grpc_server is 'nginx', expected one of grpcio, pyvoy" in done.stderr


def test_a_server_is_found_on_its_ports_alone(store, tmp_path) -> None:
    """Envoy's admin interface is no port; a second server on the same ports is refused."""
    with running(store, tmp_path / "log", *PYVOY) as server:
        assert isinstance(server, Running)
        ports = {int(url.rsplit(":", 1)[1]) for url in (server.http, server.grpc)}
        pids = [server.process.pid, *children(server.process)]
        assert set().union(*map(listening_ports, pids)) == ports
        taken = ("--http-port", free_port(), "--grpc-port", server.grpc.rsplit(":", 1)[1])
        assert "cannot listen on" in refused(store, *taken)


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which the sockets of a process listen."""
    inodes = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        target = str(one.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports
