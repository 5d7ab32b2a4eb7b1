"""Tests of the startup server, which responds while the models load: it ends on request, in any
state."""

from server.python import run_warm_python

STOPPED = """
import os, signal, socket
from pathlib import Path
from embedserve.config import ServeSettings
from embedserve.processes.startup.startup_server import serve_health_while_loading
from embedserve.processes.startup.ports import claim_ports

ports = claim_ports("127.0.0.1", 0, 0)
with serve_health_while_loading(ServeSettings(store=""), ports) as end:
    (front,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.kill(int(front), signal.SIGSTOP)
    socket.create_connection(("127.0.0.1", ports.http))
    end()
    print("there" if Path(f"/proc/{front}").exists() else "ended")
    ports.http_socket.settimeout(60)
    print(ports.http_socket.accept()[1][0])
"""

KILLED = """
import os, signal
from pathlib import Path
from embedserve.config import ServeSettings
from embedserve.processes.startup.startup_server import serve_health_while_loading
from embedserve.processes.startup.ports import claim_ports

with serve_health_while_loading(ServeSettings(store=""), claim_ports("127.0.0.1", 0, 0)) as end:
    (front,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.kill(int(front), signal.SIGKILL)
    os.waitid(os.P_PID, int(front), os.WEXITED | os.WNOWAIT)
    end()
"""

ENDING = """
import http.client, threading
from embedserve.config import ServeSettings
from embedserve.processes.startup import startup_server
from embedserve.processes.startup.ports import claim_ports

startup_server.DRAIN_S = 30.0
startup_server.END_S_MAX = 30.0
ports = claim_ports("127.0.0.1", 0, 0)
body = b'{"features": {"user": [[1]]}}'
caller = http.client.HTTPConnection("127.0.0.1", ports.http)
with startup_server.serve_health_while_loading(ServeSettings(store=""), ports) as end:
    caller.connect()
    caller.sock.sendall(b"POST /embed HTTP/1.1\\r\\nHost: localhost\\r\\n")
    caller.sock.sendall(b"Content-Length: %d\\r\\n\\r\\n" % len(body))
    late = threading.Timer(1.0, caller.sock.sendall, [body])
    late.start()
    end()
answer = http.client.HTTPResponse(caller.sock)
answer.begin()
print(answer.status, answer.read().decode())
"""


def test_startup_server_reports_loading_models_while_it_ends() -> None:
    """Checks the message, as the server starts rather than stops when it rejects these requests."""
    done = run_warm_python("-c", ENDING)
    assert done.stderr == ""
    assert done.stdout.startswith("503 ")
    assert "the models are being loaded" in done.stdout


def test_startup_server_that_was_killed_is_logged() -> None:
    line = "health checks failed while the models loaded: the startup server was ended by SIGKILL\n"
    done = run_warm_python("-c", KILLED)
    assert (done.returncode, done.stderr) == (0, line)


def test_hung_startup_server_is_killed_and_waiting_connections_are_kept() -> None:
    done = run_warm_python("-c", STOPPED)
    assert (done.stdout, done.stderr) == ("ended\n127.0.0.1\n", "")
