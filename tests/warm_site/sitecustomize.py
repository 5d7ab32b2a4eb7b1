"""Makes processes that tests do not start themselves stand-ins for forked servers.

tests/warm_relay.py has the relay. Python imports this module at its start if PYTHONPATH has its
folder. A process other than `embedserve serve` continues as without it.
"""

import os
import sys


def _be_relayed(address: str) -> None:
    """Makes the relay start the server, passes signals on to it, and exits with its status."""
    import json
    import signal
    import socket

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    start_request = {"args": sys.orig_argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}
    message = json.dumps(start_request).encode()
    socket.send_fds(channel, [len(message).to_bytes(8)], [0, 1, 2])
    channel.sendall(message)
    for number in numbers:
        signal.signal(number, lambda number, _: channel.sendall(bytes([number])))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    if not (ended := channel.recv(8)):
        os._exit(1)
    status = int.from_bytes(ended, signed=True)
    if status < 0:
        if -status in numbers:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


_ADDRESS = os.environ.get("WARM_RELAY")
if _ADDRESS and sys.orig_argv[1:6] == ["-W", "ignore", "-m", "embedserve", "serve"]:
    _be_relayed(_ADDRESS)
