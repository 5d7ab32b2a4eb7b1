"""A real S3 server on this host: rclone serves a folder and checks signatures."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

KEY, SECRET = "key", "secret"
START_LINES_MAX = 20


def environment(endpoint: str) -> dict[str, str]:
    """Returns environment variables with the endpoint and credentials, and none of this host's."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_CONFIG_FILE": os.devnull,
    }


@contextlib.contextmanager
def serve_s3(folder: Path, *options: str, host: str = "127.0.0.1") -> Iterator[str]:
    """Serves ``folder`` on a free port, with more options of rclone; yields the endpoint's URL."""
    rclone = Path(sys.executable).with_name("rclone")
    command = [str(rclone), "serve", "s3", str(folder), "--addr", f"{host}:0"]
    command += ["--config", "/dev/null", "--auth-key", f"{KEY},{SECRET}", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield _endpoint(server, host)
        finally:
            server.terminate()


def _endpoint(server: subprocess.Popen[str], host: str) -> str:
    assert server.stderr is not None
    lines = []
    for _ in range(START_LINES_MAX):
        lines.append(server.stderr.readline())
        if found := re.search(rf"\[(http://{re.escape(host)}:\d+)/\]", lines[-1]):
            return found[1]
    raise RuntimeError(f"rclone did not start: {''.join(lines)}")
