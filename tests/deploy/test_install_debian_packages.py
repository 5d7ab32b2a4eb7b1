"""Tests of install-debian-packages.sh: it installs only missing packages.

It leaves no service running. The script sees a PATH of stand-ins: the tests install nothing.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import DEPLOY

BASH = shutil.which("bash")
PLAIN = ("env", "sh", "chmod", "rm", "grep", "head", "mkdir", "mktemp")
"""Commands of the real host."""
PROGRAMS = (
    *("kubectl", "curl", "nghttp", "h2load", "nginx", "haproxy", "node", "npm", "go"),
    *("prometheus", "promtool", "chromium-headless-shell", "redis-server", "nats-server"),
)
PACKAGES = (
    "kubernetes-client curl nghttp2-client nginx-light haproxy nodejs npm golang-go "
    "prometheus chromium-headless-shell redis-server nats-server golang-google-grpc-dev"
)
UPDATE = "apt-get update -qq"
INSTALL = "apt-get install -qq -y --no-install-recommends"


class Host:
    """A folder of commands that stands in for a host, and records each call of a stand-in."""

    def __init__(self, folder: Path, user: int) -> None:
        self.folder = folder
        self.calls_file = folder / "calls"
        self.policy = folder / "policy-rc.d"
        self.command("id", f"echo {user}")
        for name in PLAIN:
            path = shutil.which(name)
            assert path is not None
            (folder / name).symlink_to(path)

    def command(self, name: str, body: str = "") -> None:
        path = self.folder / name
        path.write_text(f"#!{BASH}\n{body}\n")
        path.chmod(0o755)

    def record(self, name: str, then: str = "") -> None:
        self.command(name, f'echo "{name} $*" >> {self.calls_file}\n{then}')

    def run(self, *arguments: str, release: str = "trixie") -> subprocess.CompletedProcess[str]:
        assert BASH is not None
        os_release = self.folder / "os-release"
        os_release.write_text(f"ID=debian\nVERSION_CODENAME={release}\n")
        return subprocess.run(
            [BASH, DEPLOY / "install-debian-packages.sh", *arguments],
            env={
                "PATH": str(self.folder),
                "SBIN": str(self.folder),
                "CNI": str(self.folder),
                "OS_RELEASE": str(os_release),
            },
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


def provide_programs(host: Host, *but: str) -> None:
    for name in PROGRAMS:
        if name not in but:
            host.command(name)


def test_nothing_is_installed_if_all_programs_exist(root: Host) -> None:
    provide_programs(root)
    root.record("apt-get")
    root.record("systemctl")
    done = root.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert root.calls == []


def test_root_installs_the_packages(root: Host) -> None:
    root.record("apt-get")
    assert root.run().returncode == 0
    assert root.calls == [UPDATE, f"{INSTALL} {PACKAGES}"]


@pytest.mark.parametrize(
    ("program", "package"),
    [("kubectl", "kubernetes-client"), ("h2load", "nghttp2-client"), ("npm", "npm")],
)
def test_only_missing_packages_are_installed(root: Host, program: str, package: str) -> None:
    provide_programs(root, program)
    root.record("apt-get")
    root.record("systemctl")
    assert root.run().returncode == 0
    assert root.calls == [UPDATE, f"{INSTALL} {package}"]


def test_an_old_kubectl_is_replaced(root: Host) -> None:
    provide_programs(root)
    root.command("kubectl", """echo '{"clientVersion": {"major": "1", "minor": "20"}}'""")
    root.record("apt-get")
    assert root.run().returncode == 0
    assert root.calls == [UPDATE, f"{INSTALL} kubernetes-client"]
    root.calls_file.unlink()
    root.command("kubectl", """echo '{"clientVersion": {"major": "1", "minor": "32"}}'""")
    assert root.run().returncode == 0
    assert root.calls == []


def test_debian_12_gets_the_kubectl_of_debian_13(root: Host) -> None:
    provide_programs(root, "kubectl", "curl")
    root.record("apt-get", then='[ "$1" != indextargets ] || echo http://mirror.example/debian/')
    assert root.run(release="bookworm").returncode == 0
    indextargets, update, install, *others = root.calls
    assert indextargets.startswith("apt-get indextargets ")
    own = (
        r"apt-get -o Dir::Etc::sourcelist=\S+ -o Dir::Etc::sourceparts=/dev/null "
        r"-o Dir::State::lists=\S+ "
    )
    assert re.fullmatch(own + "update -qq", update)
    assert re.fullmatch(own + "install -qq -y --no-install-recommends kubectl", install)
    assert others == [UPDATE, f"{INSTALL} curl"]


def test_image_group_installs_image_tools(root: Host) -> None:
    provide_programs(root)
    root.record("apt-get")
    assert root.run("image").returncode == 0
    assert root.calls == [
        UPDATE,
        f"{INSTALL} podman runc debootstrap netavark aardvark-dns catatonit "
        "containernetworking-plugins",
    ]


def test_cluster_group_installs_node_tools(root: Host) -> None:
    provide_programs(root)
    root.command("podman")
    root.record("apt-get")
    root.record("systemctl")
    assert root.run("cluster").returncode == 0
    assert root.calls == [
        UPDATE,
        f"{INSTALL} runc etcd-server containerd catatonit iptables "
        "containernetworking-plugins dpkg-dev",
        "systemctl disable --quiet etcd",
        "systemctl disable --quiet containerd",
    ]


def test_unknown_group_is_rejected(root: Host) -> None:
    done = root.run("images")
    assert done.returncode == 2
    assert 'the group is "images", it must be tests, image or cluster' in done.stderr


def test_missing_go_grpc_library_is_installed(root: Host) -> None:
    provide_programs(root, "go")
    root.command("go", '[ "$*" != "list -find google.golang.org/grpc" ]')
    root.record("apt-get")
    assert root.run().returncode == 0
    assert root.calls == [UPDATE, f"{INSTALL} golang-google-grpc-dev"]


def test_new_services_are_neither_started_nor_enabled(root: Host) -> None:
    provide_programs(root, "nginx")
    root.record("apt-get", then=f"{root.policy}; echo policy-rc.d says $? >> {root.calls_file}")
    root.record("systemctl")
    assert root.run().returncode == 0
    assert root.calls == [
        UPDATE,
        "policy-rc.d says 101",
        f"{INSTALL} nginx-light",
        "policy-rc.d says 101",
        "systemctl disable --quiet nginx",
    ]
    assert not root.policy.exists()


def test_existing_service_policy_is_unchanged(root: Host) -> None:
    root.command("policy-rc.d", "exit 104")
    before = root.policy.read_text()
    root.record("apt-get")
    assert root.run().returncode == 0
    assert root.policy.read_text() == before


def test_unprivileged_user_installs_through_sudo(user: Host) -> None:
    provide_programs(user, "curl")
    user.command("policy-rc.d")
    user.record("apt-get")
    user.record("sudo", then='"$@"')
    assert user.run().returncode == 0
    sudo = "sudo env DEBIAN_FRONTEND=noninteractive"
    assert user.calls == [f"{sudo} {UPDATE}", UPDATE, f"{sudo} {INSTALL} curl", f"{INSTALL} curl"]


def test_missing_apt_get_is_reported(root: Host) -> None:
    done = root.run()
    assert done.returncode == 1
    assert "this host has no apt-get" in done.stderr
    assert done.stderr.count("\n") == 1


def test_missing_sudo_is_reported(user: Host) -> None:
    user.record("apt-get")
    done = user.run()
    assert done.returncode == 1
    assert "there is no sudo" in done.stderr
    assert user.calls == []


def test_failed_install_exits_with_an_error(root: Host) -> None:
    provide_programs(root, "curl")
    root.record("apt-get", then='[ "$1" = update ]')
    done = root.run()
    assert done.returncode == 1
    assert "could not install curl" in done.stderr
    assert not root.policy.exists()
