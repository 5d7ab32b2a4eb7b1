"""Tests of the processes of a cluster: which ones are restarted, and that none outlives the
cluster."""

import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forkserver import PYTHON, WarmPopen
from running_servers import free_port, is_running
from server.python import environment
from waits import wait_until

from embedserve.processes.cluster_child import SHARD_PORTS, Child, held_ports
from embedserve.processes.cluster_settings import ClusterSettings
from embedserve.processes.forked import QUICK_END_S
from embedserve.processes.local_cluster import LocalCluster, _router_arguments, _shard
from embedserve.processes.startup.ports import claim_ports

WAIT_S_MAX = 60
pytestmark = pytest.mark.usefixtures("warm")
CHILD = """
import os, signal, socket, sys
def say(words):  # in one write, as other processes write to the same file
    os.write(2, f"{words}\\n".encode())
if sys.argv[1] == "fails":
    sys.exit("it cannot start")
def stop(*_):
    say(f"{sys.argv[1]} stopped")
    os._exit(0)
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("ignores SIGTERM")
    while True:
        signal.pause()
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGHUP, lambda *_: say(f"{sys.argv[1]} polls"))
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    sock.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
say(f"{sys.argv[1]} is ready")
while True:
    signal.pause()
"""
CLUSTER = f"""
import sys
from pathlib import Path
from embedserve.commands.cli_errors import cli_errors
from embedserve.processes.cluster_child import Child
from embedserve.processes.local_cluster import LocalCluster
folder, *kinds = sys.argv[1:]
def command(kind):
    python = f"{{folder}}/python" if kind == "linked" else sys.executable
    return [python, "-S", "-c", {CHILD!r}, kind]
shards = [
    Child(f"part {{part}}", command(kind), shard_host="127.0.0.1", is_piped=True)
    for part, kind in enumerate(kinds)
]
router = Child("router", command("router"))
def write_addresses():
    if Path(folder, "full").exists():
        raise OSError("the disk is full")
    print("addresses", *(one.address for one in shards), flush=True)
with cli_errors():
    LocalCluster(shards, router, write_addresses).run(Path(folder))
"""


class RunningCluster:
    """A cluster of processes that serve nothing, and its log."""

    def __init__(self, folder: Path, kinds: tuple[str, ...]) -> None:
        self._log = folder / "log"
        with self._log.open("wb") as output:
            self.process = WarmPopen(
                [*PYTHON, "-c", CLUSTER, folder, *kinds],
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def log(self) -> str:
        return self._log.read_text()

    def pids(self, name: str = r"part \d+") -> list[int]:
        """Returns the process ids of the shards that were started."""
        return [
            int(pid) for pid in re.findall(rf"^{name} starts as process (\d+)", self.log(), re.M)
        ]

    def wait_for(self, words: str, count: int = 1) -> None:
        wait_until(lambda: self.log().count(words) >= count, self.log)


@contextmanager
def cluster(folder: Path, *kinds: str) -> Iterator[RunningCluster]:
    running = RunningCluster(folder, kinds)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        wait_until_ended(running.pids())


def wait_until_ended(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), lambda: pids)


def test_write_of_shard_addresses_is_retried_after_a_failure(tmp_path: Path) -> None:
    with cluster(tmp_path, "shard") as running:
        running.wait_for("router is ready")
        (tmp_path / "full").touch()
        os.kill(running.pids()[0], signal.SIGKILL)
        running.wait_for("the addresses of the shards cannot be written: the disk is full")
        running.wait_for("part 0: shard is ready", 2)
        written = running.log().count("addresses 127.0.0.1")
        (tmp_path / "full").unlink()
        running.wait_for("addresses 127.0.0.1", written + 1)
        running.process.terminate()
        assert running.process.wait(WAIT_S_MAX) == 0
        assert running.log().count("cannot be written") == 1


def test_cluster_whose_log_cannot_be_written_runs_on(tmp_path: Path) -> None:
    with cluster(tmp_path, "shard") as running:
        running.wait_for("router is ready")
        pid, [killed] = running.process.pid, running.pids()
        children = Path(f"/proc/{pid}/task/{pid}/children")
        nbytes = (tmp_path / "log").stat().st_size
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
        before = set(children.read_text().split())
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: set(children.read_text().split()) - before, running.log)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        running.wait_for("addresses 127.0.0.1", 2)
        running.process.terminate()
        assert running.process.wait(WAIT_S_MAX) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_router_then_the_shards(tmp_path: Path, number: int) -> None:
    with cluster(tmp_path, "shard", "shard") as running:
        running.wait_for("router is ready")
        running.process.send_signal(number)
        assert running.process.wait(WAIT_S_MAX) == 0
        pids = running.pids()
        assert len(pids) == 2
        assert not any(map(is_running, pids))
        stopped = re.findall(r"^.*stopped$", running.log(), re.M)
        assert stopped[0] == "router stopped"
        assert sorted(stopped[1:]) == ["part 0: shard stopped", "part 1: shard stopped"]


def test_second_signal_kills_remaining_processes(tmp_path: Path) -> None:
    with cluster(tmp_path, "shard", "stubborn") as running:
        running.wait_for("part 0: shard is ready")
        running.wait_for("part 1: ignores SIGTERM")
        running.process.terminate()
        running.wait_for("part 0: shard stopped")
        assert running.process.poll() is None
        running.process.terminate()
        assert running.process.wait(WAIT_S_MAX) == 0
        assert not any(map(is_running, running.pids()))
        assert "router is ready" not in running.log()


def test_all_processes_poll_the_store_on_sighup(tmp_path: Path) -> None:
    with cluster(tmp_path, "shard") as running:
        running.wait_for("router is ready")
        running.process.send_signal(signal.SIGHUP)
        running.wait_for("router polls")
        running.wait_for("part 0: shard polls")


def test_no_shard_outlives_a_cluster_that_is_killed(tmp_path: Path) -> None:
    with cluster(tmp_path, "shard", "shard") as running:
        running.wait_for("router is ready")
        running.process.kill()
        running.process.wait()
        wait_until_ended(running.pids())


def test_killed_shard_is_restarted(tmp_path: Path) -> None:
    with cluster(tmp_path, "shard", "shard") as running:
        running.wait_for("router is ready")
        [pid] = running.pids("part 1")
        os.kill(pid, signal.SIGKILL)
        running.wait_for("part 1: shard is ready", 2)
        assert "part 1 was ended by SIGKILL; it starts again now" in running.log()
        assert len(running.pids("part 0")) == 1


def test_failed_restart_of_a_shard_is_retried_later(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    with cluster(tmp_path, "shard", "linked") as running:
        running.wait_for("router is ready")
        python.unlink()
        [pid] = running.pids("part 1")
        os.kill(pid, signal.SIGKILL)
        running.wait_for("it is tried again in 1 s")
        assert "part 1 cannot start: [Errno 2] No such file or directory" in running.log()
        python.symlink_to(sys.executable)
        running.wait_for("part 1: linked is ready", 2)
        assert len(running.pids("part 0")) == 1


def test_a_shard_that_fails_at_the_start_ends_the_cluster(tmp_path: Path) -> None:
    with cluster(tmp_path, "shard", "fails") as running:
        assert running.process.wait(WAIT_S_MAX) == 1
        assert "part 1: it cannot start" in running.log()
        assert "embedserve: part 1 ended with exit code 1 before it was ready" in running.log()
        assert "router is ready" not in running.log()
        assert not any(map(is_running, running.pids()))


def test_folder_whose_name_is_too_long_for_sockets_is_named(tmp_path: Path) -> None:
    cluster = LocalCluster([], Child("router", []), lambda: None)
    with pytest.raises(OSError, match=r"^TMPDIR \(.*x\): AF_UNIX path too long"):
        cluster.run(tmp_path / ("x" * 100))


def test_restart_delay_grows_for_a_child_that_keeps_ending() -> None:
    child = Child("part 0", [])
    assert [child.on_end(100.0) for _ in range(7)] == [1, 1, 2, 4, 8, 16, 30]
    assert child.restarts.at_s == 130.0


def test_ready_child_is_restarted_immediately_once_a_minute() -> None:
    child = Child("part 0", [])
    child.on_ready(0.0)
    assert child.on_end(1.0) == 0.0
    assert child.restarts.at_s == 1.0
    assert child.on_end(2.0) == 1.0
    child.on_ready(3.0)
    assert child.on_end(3.0 + QUICK_END_S) == 0.0


def test_children_get_different_ports_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def start() -> Child:
        """Starts a child that tries the ports of the others first."""
        tried = iter([*used, *SHARD_PORTS])
        monkeypatch.setattr(random, "choice", lambda _: next(tried))
        child = Child("part 0", [sys.executable, "-S", "-c", ""], shard_host="127.0.0.1")
        child.start("@nobody")
        assert child.process is not None
        _, http_port, _, grpc_port = child.process.args[-4:]  # type: ignore[index]
        used.extend(int(str(port)) for port in (http_port, grpc_port))
        return child

    def end(child: Child) -> None:
        assert child.process is not None
        child.process.wait(WAIT_S_MAX)
        child.on_end(0.0)

    children = [start() for _ in range(3)]
    assert len(set(used)) == 6
    for child in children:
        end(child)
    end(start())
    assert used[-1] in used[:6]


def test_ports_of_a_child_are_taken_before_it_listens() -> None:
    child = Child("part 0", [sys.executable, "-S", "-c", "input()"], shard_host="127.0.0.1")
    child.start("@nobody")
    assert child.process is not None
    _, http_port, _, grpc_port = child.process.args[-4:]  # type: ignore[index]
    for port in (int(str(http_port)), int(str(grpc_port))):
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))  # as another cluster that draws the same port
        claim_ports("127.0.0.1", port, 0).close()  # as the child itself
        claim_ports("127.0.0.1", 0, port).close()
    child.process.wait(WAIT_S_MAX)
    child.on_end(0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_shards_do_not_draw_the_ports_of_the_router() -> None:
    ports = free_port(), free_port()
    with held_ports("127.0.0.1", *ports):
        for port in ports:
            with socket.socket() as shard, pytest.raises(OSError, match="Address already in use"):
                shard.bind(("127.0.0.1", port))
        router = claim_ports("127.0.0.1", *ports).share()
        worker = router.bind()
        worker.listen(with_grpc=True)
        worker.close()
        router.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports[0]))


def test_shards_hold_versions_and_the_router_follows_aliases() -> None:
    settings = ClusterSettings(
        "s3://b/store", ("m@stable", "m", "n@7"), follow="alias", cache="c", shard_timeout_ms=900
    )
    shard = _shard(settings, 1, 2, 0)
    assert shard.name == "part 1"
    _, _, _, _, _, *arguments = shard._arguments
    assert " ".join(arguments) == (
        "serve s3://b/store --model m --model n@7 --part 1/2 --devices cpu --follow latest "
        "--cache c"
    )
    _, _, _, _, _, *arguments = _router_arguments(settings, Path("shards.json"))
    assert " ".join(arguments) == (
        "serve s3://b/store --model m@stable --model m --model n@7 --shards file:shards.json "
        "--follow alias --shard-timeout-ms 900 --http-port 8000 --grpc-port 8001 --cache c"
    )


def test_shards_and_the_router_have_configurations_of_their_own() -> None:
    settings = ClusterSettings("store", shard_config="shard.toml", router_config="router.toml")
    assert "--config shard.toml" in " ".join(_shard(settings, 0, 1, 0)._arguments)
    router = " ".join(_router_arguments(settings, Path("shards.json")))
    assert "--config router.toml" in router
    assert "shard.toml" not in router


def test_serve_settings_in_the_environment_do_not_reach_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from embedserve.processes.cluster_child import _child_environment

    for name in ("PART", "BODY_BYTES_MAX", "CONFIG", "OTHER"):
        monkeypatch.setenv(f"EMBEDSERVE_{name}", "1")
    found = [name for name in _child_environment(os.environ) if name.startswith("EMBEDSERVE_")]
    assert found == ["EMBEDSERVE_OTHER"]
