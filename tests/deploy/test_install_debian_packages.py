"""install-debian-packages.sh calls apt-get only where kubectl is missing.

The script sees a PATH of stand-ins: nothing is installed by these tests.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import DEPLOY

BASH = shutil.which("bash")
ENV = shutil.which("env")
INSTALL = "apt-get install -qq -y --no-install-recommends kubernetes-client"


class Host:
    """A folder of commands that stands for a host; each call of a stand-in is written down."""

    def __init__(self, folder: Path, user: int) -> None:
        self.folder = folder
        self.calls_file = folder / "calls"
        self.command("id", f"echo {user}")
        assert ENV is not None
        (folder / "env").symlink_to(ENV)

    def command(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!{BASH}\n{body}\n")
        path.chmod(0o755)

    def record(self, name: str, then: str = "") -> None:
        self.command(name, f'echo "{name} $*" >> {self.calls_file}\n{then}')

    def run(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BASH, DEPLOY / "install-debian-packages.sh"],
            env={"PATH": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def root(tmp_path: Path) -> Host:
    return Host(tmp_path, user=0)


@pytest.fixture
def user(tmp_path: Path) -> Host:
    return Host(tmp_path, user=1000)


def test_nothing_happens_where_kubectl_is(root: Host) -> None:
    root.record("kubectl")
    root.record("apt-get")
    done = root.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert root.calls == []


def test_root_installs_the_package(root: Host) -> None:
    root.record("apt-get")
    assert root.run().returncode == 0
    assert root.calls == ["apt-get update -qq", INSTALL]


def test_another_user_asks_sudo(user: Host) -> None:
    user.record("apt-get")
    user.record("sudo", then='"$@"')
    assert user.run().returncode == 0
    sudo = "sudo env DEBIAN_FRONTEND=noninteractive"
    assert user.calls == [
        f"{sudo} apt-get update -qq",
        "apt-get update -qq",
        f"{sudo} {INSTALL}",
        INSTALL,
    ]


def test_a_host_without_apt_get_is_told_so(root: Host) -> None:
    done = root.run()
    assert done.returncode == 1
    assert "this host has no apt-get" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_user_without_sudo_is_told_so(user: Host) -> None:
    user.record("apt-get")
    done = user.run()
    assert done.returncode == 1
    assert "there is no sudo" in done.stderr
    assert user.calls == []


def test_a_failed_install_fails(root: Host) -> None:
    root.record("apt-get", then='[ "$1" = update ]')
    done = root.run()
    assert done.returncode == 1
    assert "could not install kubernetes-client" in done.stderr
