"""Tests of `embedserve cluster --backend ray` on a Ray cluster of three nodes.

It leaves nothing behind, and loses no batch when processes and a node are killed.
"""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from certificates import Authority
from e2e.parts_cluster import SLOW_CALL_OPTIONS
from e2e.test_cluster_command import DIM, publish_rows
from forkserver import PYTHON
from processes import descendants
from ray_nodes import RayNodes, ray_nodes
from running_servers import command, free_port, is_running, run_warm_command, running, started

from embedserve.commands.token import make_token
from embedserve_client import GrpcEmbedClient

WAIT_S_MAX = 300
PAUSE_S = 0.02
REQUEST_PAUSE_S_MAX = 0.1
"""Longest pause in seconds between requests. Pauses begin with PAUSE_S after a kill, and grow."""
NAME = "shop"
PARTS = REPLICAS = 2
TCP_LISTEN = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "0" * 24 + "01000000"}
"""127.0.0.1, also as an IPv6 address, and ::1, in the format of /proc/net."""
PLACED_LINE = re.compile(r"\([^()]* pid=(\d+)[^)]*\) (part \d replica \d) starts as process (\d+)")
"""Pattern of a log line. Once the actor's constructor has returned, the line also begins with the
label."""
POLLS = re.compile(r"\((part \d replica \d) pid=\d+[^)]*\) polls")
CHILD = """
import os, signal, socket, sys
if sys.argv[1] == "fails":
    sys.exit("it cannot start")
def stop(*_):
    open(f"{sys.argv[2]}/stopped-{os.getpid()}", "x").close()
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGHUP, lambda *_: print("polls", file=sys.stderr, flush=True))
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    name = os.environ["NOTIFY_SOCKET"]
    sock.sendto(b"READY=1", name.replace("@", chr(0)))
print("threads", os.environ.get("OMP_NUM_THREADS"), file=sys.stderr, flush=True)
while True:
    signal.pause()
"""
"""Script of a shard that serves nothing, and imports nothing slow."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes() as started:
        yield started


class PlacedShards:
    """A process that places shards in Ray, and its output."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, is_true: Callable[[str], object]) -> None:
        wait_until(lambda: is_true(self.log()), self.log)

    def shards(self) -> dict[str, tuple[int, int]]:
        """Returns, by label, the process ids of each shard's last actor and server."""
        return {
            label: (int(worker), int(shard))
            for worker, label, shard in PLACED_LINE.findall(self.log())
        }

    def pids(self) -> list[int]:
        return [int(shard) for *_, shard in PLACED_LINE.findall(self.log())]


def wait_until(
    is_true: Callable[[], object], state: Callable[[], object], pause_s_max: float = PAUSE_S
) -> None:
    """Waits until the condition holds, with growing pauses up to ``pause_s_max``."""
    end_s, pause_s = time.monotonic() + WAIT_S_MAX, PAUSE_S
    while not is_true():
        assert time.monotonic() < end_s, state()
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.1, pause_s_max)


@contextmanager
def placed_shards(
    nodes: RayNodes, folder: Path, *kinds: str, replicas: int = 1, name: str = NAME
) -> Iterator[PlacedShards]:
    """Places shards that serve nothing: one part for each of ``kinds``."""
    settings = {
        "name": name,
        "ray_address": nodes.address,
        "path": str(folder / "shards.json"),
        "commands": [["-S", "-c", CHILD, kind, str(folder)] for kind in kinds],
        "replicas": replicas,
    }
    module = "embedserve.processes.ray_backend"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
        reports.bind("")
        address = f"@{reports.getsockname()[1:].decode()}"
        words = [*PYTHON, "-m", module, "place", json.dumps(settings)]
        environment = nodes.environment | {"NOTIFY_SOCKET": address}
        with started(words, folder / "log", env=environment) as process:
            try:
                yield PlacedShards(process, folder / "log")
            finally:
                process.kill()


def addresses(folder: Path) -> list[list[str]]:
    """Returns the addresses in the file that routers read."""
    return [*json.loads((folder / "shards.json").read_text()).values()]


def test_sigterm_ends_the_shards_and_leaves_nothing_in_ray(nodes: RayNodes, tmp_path: Path) -> None:
    with placed_shards(nodes, tmp_path, "shard", "shard") as one:
        threads = nodes.environment.get("OMP_NUM_THREADS")  # not Ray's value for its workers
        one.wait_for(lambda log: log.count(f"threads {threads}") == 2)
        wait_until((tmp_path / "shards.json").exists, one.log)
        assert list(map(len, addresses(tmp_path))) == [1, 1]
        one.process.send_signal(signal.SIGHUP)
        one.wait_for(lambda log: log.count("polls") == 2)
        assert {*POLLS.findall(one.log())} == {"part 0 replica 0", "part 1 replica 0"}
        nodes.send_question("kill")  # Ray does not restart it
        one.wait_for(lambda log: log.count("threads") == 3)
        assert "part 1 replica 0: its actor ended, and is created again: " in one.log()
        one.process.terminate()
        assert one.process.wait(WAIT_S_MAX) == 0
        assert not any(map(is_running, one.pids()))
        assert len(one.shards()) == 2
        for _, shard in one.shards().values():  # SIGTERM is what makes shards drain
            assert (tmp_path / f"stopped-{shard}").exists()
        assert nodes.send_question("left") == [[], 0]


def test_killed_process_leaves_nothing_and_its_name_is_free_again(
    nodes: RayNodes, tmp_path: Path
) -> None:
    with placed_shards(nodes, tmp_path, "shard") as one:
        wait_until((tmp_path / "shards.json").exists, one.log)
        (tmp_path / "other").mkdir()
        with placed_shards(nodes, tmp_path / "other", "shard", "shard") as other:  # two parts
            assert other.process.wait(WAIT_S_MAX) == 1
            assert "embedserve: Ray has shards of the name 'shop' already" in other.log()
        one.process.kill()
        one.process.wait()
        wait_until(lambda: not any(map(is_running, one.pids())), one.pids)
        wait_until(
            lambda: nodes.send_question("left") == [[], 0], lambda: nodes.send_question("left")
        )


def test_shards_that_cannot_start_are_reported(nodes: RayNodes, tmp_path: Path) -> None:
    with placed_shards(nodes, tmp_path, "shard", "fails") as one:
        assert one.process.wait(WAIT_S_MAX) == 1
        assert "it cannot start" in one.log()
        words = "embedserve: part 1 replica 0 ended with exit code 1 before it was ready"
        assert words in one.log()
    with placed_shards(nodes, tmp_path, "shard", replicas=4) as one:
        assert one.process.wait(WAIT_S_MAX) == 1
        assert "replicas is 4, and each replica of a part needs a Ray node of its own" in one.log()
        assert "with 1 CPU: 3 nodes are alive" in one.log()
    assert nodes.send_question("left") == [[], 0]


def test_router_without_shards_in_ray_does_not_start(nodes: RayNodes, tmp_path: Path) -> None:
    publish_rows(tmp_path / "store", "m", PARTS)
    done = run_warm_command(
        "serve", tmp_path / "store", "--shards", "ray:nobody", environment=nodes.environment
    )
    assert done.returncode == 1
    assert "embedserve: Ray has no shards of the name 'nobody'" in done.stderr
    assert "embedserve: --shards is 'ray:nobody': no addresses were found" in done.stderr


@contextmanager
def cluster(
    nodes: RayNodes, store: Path, log: Path, grpc: int, *more: object
) -> Iterator[PlacedShards]:
    """Runs `embedserve cluster --backend ray`, and yields it once it is ready."""
    options = (
        *more,
        "--replicas",
        REPLICAS,
        "--name",
        NAME,
        "--http-port",
        free_port(),
        *SLOW_CALL_OPTIONS,
    )
    words = command("cluster", store, "--backend", "ray", *options, "--grpc-port", grpc)
    with started(words, log, stopped_s_max=WAIT_S_MAX, env=nodes.environment) as process:
        one = PlacedShards(process, log)
        ready = f"gRPC 127.0.0.1:{grpc}\n"
        one.wait_for(lambda text: ready in text or process.poll() is not None)
        assert ready in one.log(), one.log()
        yield one


def write_configs(folder: Path, capfd: pytest.CaptureFixture[str]) -> tuple[Path, Path]:
    """Writes the TLS files, tokens and settings of shards and routers.

    Returns the files of the shards' settings and the routers' ones.
    """
    authority = Authority()
    (folder / "ca.pem").write_bytes(authority.root)
    for name in ("shard", "router"):
        authority.sign(name).write(folder, name)
    make_token("router", None, "embed", None, None, None)
    line, token = capfd.readouterr()
    (folder / "tokens").write_text(line)
    (folder / "token").write_text(token)
    shard, router = folder / "shard.toml", folder / "router.toml"
    shard.write_text(
        f'tls_cert = "{folder}/shard.pem"\ntls_key = "{folder}/shard.key"\n'
        f'tls_client_ca = "{folder}/ca.pem"\ntokens = "{folder}/tokens"\n'
    )
    router.write_text(
        f'shard_ca = "{folder}/ca.pem"\nshard_token = "{folder}/token"\n'
        f'shard_cert = "{folder}/router.pem"\nshard_key = "{folder}/router.key"\n'
    )
    return shard, router


def check_shards_authenticate(one: PlacedShards, folder: Path) -> None:
    """Checks that each shard wants the certificate of a router, and its token."""
    ports = re.findall(r"part \d replica \d starts as .*:(\d+)$", one.log(), re.M)
    assert len(ports) == PARTS * REPLICAS
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    for port in ports:
        with pytest.raises(httpx.TransportError):  # the certificate of a client is missing
            httpx.get(f"https://127.0.0.1:{port}/models", verify=context)
    context.load_cert_chain(folder / "router.pem", folder / "router.key")
    for port in ports:
        found = httpx.get(f"https://127.0.0.1:{port}/models", verify=context)
        assert found.status_code == 401


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def listening(pids: set[int]) -> list[str]:
    """Returns the addresses, in hexadecimal, on which the processes accept TCP connections."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):  # the process has ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # the process has closed the file
                    sockets.add(os.readlink(link))
    found = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *others = line.split()
            if state == TCP_LISTEN and f"socket:[{others[5]}]" in sockets:
                found.append(local.partition(":")[0])
    return found


def is_follower(pid: int) -> bool:
    """Returns whether a process polls Ray for the addresses of a router."""
    return b"follow-once" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def check_nodes_of(shards: dict[str, tuple[int, int]]) -> None:
    """Checks that the replicas of a part, given by their processes, are on different Ray nodes."""
    hosts = {label: parent_of(worker) for label, (worker, _) in shards.items()}
    for part in range(PARTS):
        assert hosts[f"part {part} replica 0"] != hosts[f"part {part} replica 1"]


def test_killed_shards_actors_and_nodes_are_replaced_without_lost_batches(
    nodes: RayNodes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Checks shards that have TLS and tokens of their configuration."""
    store, log, grpc = tmp_path / "store", tmp_path / "log", free_port()
    publish_rows(store, "m", PARTS)
    shard_config, router_config = write_configs(tmp_path, capfd)
    configs = ("--shard-config", shard_config, "--router-config", router_config)
    for name, value in nodes.environment.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        one = stack.enter_context(cluster(nodes, store, log, grpc, *configs))
        check_shards_authenticate(one, tmp_path)
        options = ("--shards", f"ray:{NAME}", "--config", router_config, *SLOW_CALL_OPTIONS)
        clients_stack = stack.enter_context(ExitStack())
        router = clients_stack.enter_context(running(store, tmp_path / "router", *options))
        clients = [
            clients_stack.enter_context(GrpcEmbedClient(address))
            for address in (f"127.0.0.1:{grpc}", router.grpc)
        ]
        logs = [log, router.log]

        def check_requests() -> None:
            for client in clients:
                answer = np.asarray(client.embed({"user": [[3, 97]]}, timeout_s=60)["user"])
                assert answer.tobytes() == np.full((1, DIM), 100, np.float32).tobytes()

        def joined_replicas() -> list[list[str]]:
            """Returns, for each router, the addresses of replicas that joined, one per join."""
            pattern = r"part \d of 2: (\S+) joined for m@1"
            return [re.findall(pattern, path.read_text()) for path in logs]

        def request_until(is_true: Callable[[], bool]) -> None:
            def request_and_check() -> bool:
                check_requests()
                return is_true()

            wait_until(
                request_and_check, lambda: (joined_replicas(), one.log()), REQUEST_PAUSE_S_MAX
            )

        def kill_and_request_until_replaced(count: int, *killed: int) -> None:
            """Kills processes, and sends requests until both routers have ``count`` more shards."""
            before = [set(found) for found in joined_replicas()]
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            request_until(
                lambda: all(
                    len(set(found) - known) >= count
                    for found, known in zip(joined_replicas(), before, strict=True)
                )
            )

        shards = one.shards()
        assert len(shards) == PARTS * REPLICAS
        check_nodes_of(shards)
        roots = (os.getpid(), one.process.pid, parent_of(nodes.gcs))
        found = listening({pid for root in roots for pid in descendants(root)})
        assert len(found) > PARTS * REPLICAS * 2
        assert set(found) <= LOOPBACK

        # Kills a server, whose end Ray does not notice, and an actor with its server.
        servers = {label: nodes.servers[shard] for label, (_, shard) in shards.items()}
        kill_and_request_until_replaced(
            2, servers["part 0 replica 0"], shards["part 1 replica 1"][0]
        )
        wait_until(lambda: not is_running(servers["part 1 replica 1"]), one.log)

        shards = one.shards()
        raylets = [parent_of(worker) for worker, _ in shards.values()]
        victim = next(pid for pid in nodes.raylets[1:] if pid in raylets)
        lost = [label for label, host in zip(shards, raylets, strict=True) if host == victim]
        [follower] = [pid for pid in descendants(router.process.pid) if is_follower(pid)]
        kill_and_request_until_replaced(len(lost), follower, victim)
        servers = {label: nodes.servers[shard] for label, (_, shard) in shards.items()}
        wait_until(lambda: not any(is_running(servers[label]) for label in lost), one.log)

        (tmp_path / "small").mkdir()
        small = stack.enter_context(placed_shards(nodes, tmp_path / "small", "shard", name="small"))
        wait_until((tmp_path / "small" / "shards.json").exists, small.log)
        os.kill(nodes.gcs, signal.SIGKILL)  # lookups do not need the GCS, and the addresses stay
        for _ in range(100):
            check_requests()
        small.process.terminate()  # Ray would wait for the GCS for a minute, and exit with 1
        assert small.process.wait(WAIT_S_MAX) == 0
        clients_stack.close()  # first, as without the GCS each process that uses Ray takes a core
        one.process.terminate()
        assert one.process.wait(WAIT_S_MAX) == 0
    pids = [pid for shard in one.pids() for pid in (shard, nodes.servers[shard])]
    wait_until(lambda: not any(map(is_running, pids)), one.log)
