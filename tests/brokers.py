"""Real Redis and NATS brokers on free loopback ports, and a fake broker that sends given bytes."""

import hashlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from certificates import Authority
from interop.tools import tool
from running_servers import free_port
from waits import wait_until

KINDS = ("redis", "nats")
USER, PASSWORD = "trainer", "open sesame: 7%"
QUOTED = "open%20sesame%3A%207%25"
WAIT_S_MAX = 60.0


class Broker:
    """A broker process that a test can stop, kill and start again on the same port.

    Attributes:
        url: address of the broker, with user and password if it has them.
        address: the same address without user and password.
    """

    def __init__(
        self, kind: str, folder: Path, *, has_password: bool = False, authority: Path | None = None
    ) -> None:
        """Takes the kind of broker and the folder for its files.

        Args:
            authority: folder with the certificate and key for TLS, as ``tls_files`` writes them.
        """
        self.kind, self._folder, self.port = kind, folder / kind, free_port()
        self._has_password, self._authority = has_password, authority
        self._folder.mkdir()
        scheme = {"redis": "rediss", "nats": "tls"}[kind] if authority else kind
        login = f"{USER}:{QUOTED}@" if has_password else ""
        self.url = f"{scheme}://{login}127.0.0.1:{self.port}"
        self.address = f"{scheme}://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = self._redis() if self.kind == "redis" else self._nats()
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [tool(command[0]), *command[1:]], stdout=log, stderr=log, cwd=self._folder
            )
        wait_until(self._listens)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Ends the process with kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_S_MAX)
            self.process = None

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self._folder / "log").read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def _redis(self) -> list[str]:
        port = ["--port", str(self.port)]
        if self._authority:
            port = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            port += ["--tls-cert-file", str(self._authority / "broker.pem")]
            port += ["--tls-key-file", str(self._authority / "broker.key")]
            port += ["--tls-ca-cert-file", str(self._authority / "root.pem")]
        login = []
        if self._has_password:
            users = self._folder / "users.acl"
            file = self._folder / "redis.conf"
            hashed = hashlib.sha256(PASSWORD.encode()).hexdigest()
            users.write_text(f"user default off\nuser {USER} on #{hashed} ~* &* +@all\n")
            file.write_text(f"aclfile {users}\n")
            login = [str(file)]
        return ["redis-server", *login, *port, "--bind", "127.0.0.1", "--save", ""]

    def _nats(self) -> list[str]:
        command = ["nats-server", "-a", "127.0.0.1", "-p", str(self.port), "-js"]
        command += ["-sd", str(self._folder / "stored")]
        if self._has_password:
            file = self._folder / "nats.conf"
            file.write_text(f'authorization {{ user: "{USER}", password: "{PASSWORD}" }}\n')
            command += ["-c", str(file)]
        if self._authority:
            command += ["--tls", "--tlscert", str(self._authority / "broker.pem")]
            command += ["--tlskey", str(self._authority / "broker.key")]
        return command


@contextmanager
def running(broker: Broker) -> Iterator[Broker]:
    """Runs a broker inside the context, and kills it at the end."""
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


def tls_files(folder: Path) -> Path:
    """Writes the certificate of a broker at 127.0.0.1, its key and the root certificate."""
    folder.mkdir()
    authority = Authority()
    authority.sign("broker").write(folder, "broker")
    (folder / "root.pem").write_bytes(authority.root)
    return folder


class FakeBroker:
    """A server that sends given bytes to every client, repeatedly or once.

    Attributes:
        connections: number of connections so far.
        sent_bytes_max: most bytes that one connection has accepted.
    """

    def __init__(self, *parts: bytes, is_endless: bool = False) -> None:
        self._parts, self._is_endless = parts, is_endless
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.connections = self.sent_bytes_max = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_over.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._send, args=(peer,), daemon=True).start()

    def _send(self, peer: socket.socket) -> None:
        sent = 0
        with peer, suppress(OSError):
            for part in self._sent():
                peer.sendall(part)
                sent += len(part)
                self.sent_bytes_max = max(self.sent_bytes_max, sent)
            self._is_over.wait(WAIT_S_MAX)

    def _sent(self) -> Iterator[bytes]:
        yield from self._parts
        while self._is_endless and not self._is_over.is_set():
            yield self._parts[-1]
