"""One node and its control plane, as child processes with all files in one folder.

Kubernetes 1.20 is built by build_kubernetes.sh; etcd and containerd are Debian's. Nothing listens
outside of the network namespace. Pods are on a bridge in it, and Services use kube-proxy's
iptables.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certificates import Authority
from interop.cluster.host import CGROUP, NODE, PODS, SERVICES
from interop.cluster.images import PAUSE
from interop.cluster.kubectl import Kubectl
from interop.tools import CACHE, tool

KUBERNETES = CACHE / "kubernetes"
"""Folder of Kubernetes, built by make cluster-test."""
CNI_PLUGINS = Path("/usr/lib/cni")
NAME = "node"
TOKEN = "administrator-of-this-namespace"
START_S_MAX = 180
STOP_S_MAX = 30
LOG_MAX = 4000
"""Characters of a program's log in the error of a failed start."""
Check = Callable[[], bool]


@dataclass(frozen=True)
class Node:
    """Starts the programs of a node, with all files in ``folder``."""

    folder: Path
    ends: ExitStack

    def start(self, program: str | Path, *options: str, is_ready: Check = lambda: True) -> None:
        """Starts a program, and waits until it is ready."""
        path = Path(program)
        log = self.folder / f"{path.name}.log"
        with log.open("ab") as output:
            # In another process group, so that Ctrl-C does not reach it: the tests end the
            # programs.
            process = subprocess.Popen(
                [path, *options], stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        self.ends.callback(_stop, process)
        end = time.monotonic() + START_S_MAX
        while not is_ready():
            is_failed = process.poll() is not None or time.monotonic() > end
            assert not is_failed, f"{path} does not start: {log.read_text()[-LOG_MAX:]}"
            time.sleep(0.2)

    def write(self, name: str, content: Mapping[str, Any]) -> str:
        path = self.folder / name
        path.write_text(json.dumps(content))
        return str(path)

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def containerd(self) -> Path:
        return self.folder / "containerd.sock"

    def start_control_plane(self, kubectl: Kubectl) -> None:
        self._start_etcd()
        self._start_apiserver(lambda: kubectl.try_run("get", "--raw", "/readyz") == "ok")
        same = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--port=0")
        for program in ("kube-controller-manager", "kube-scheduler"):
            self.start(KUBERNETES / program, *same, f"--cert-dir={self.folder}/{program}")

    def _start_etcd(self) -> None:
        peers = "http://127.0.0.1:2380"
        self.start(
            tool("etcd"),
            f"--data-dir={self.folder}/etcd",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )

    def _start_apiserver(self, is_ready: Check) -> None:
        authority = Authority()
        certificate, key = authority.sign("apiserver").write(self.folder, "apiserver")
        root = self.folder / "root.pem"
        root.write_bytes(authority.root)
        tokens = self.folder / "tokens"
        tokens.write_text(f"{TOKEN},administrator,administrator,system:masters\n")
        cluster = {"server": "https://127.0.0.1:6443", "certificate-authority": str(root)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": NAME, "cluster": cluster}],
            "users": [{"name": NAME, "user": {"token": TOKEN}}],
            "contexts": [{"name": NAME, "context": {"cluster": NAME, "user": NAME}}],
            "current-context": NAME,
        }
        self.write(self.kubeconfig.name, config)
        self.start(
            KUBERNETES / "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            "--bind-address=127.0.0.1",
            f"--advertise-address={NODE}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=AlwaysAllow",
            f"--service-cluster-ip-range={SERVICES}",
            # Pods have no service accounts here.
            "--disable-admission-plugins=ServiceAccount",
            "--service-account-issuer=https://127.0.0.1",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={certificate}",
            is_ready=is_ready,
        )

    def start_containerd(self) -> None:
        config = self._containerd_config()
        self.start(tool("containerd"), "--config", config, is_ready=self._has_containerd)

    def _has_containerd(self) -> bool:
        return self._ctr("version") is not None

    def _ctr(self, *arguments: str) -> str | None:
        command = [tool("ctr"), "--address", str(self.containerd), "--namespace", "k8s.io"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else None

    def _containerd_config(self) -> str:
        network = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "pods0",
                    "isDefaultGateway": True,
                    "hairpinMode": True,
                    "ipam": {"type": "host-local", "ranges": [[{"subnet": PODS}]]},
                }
            ],
        }
        (self.folder / "cni").mkdir()
        self.write("cni/pods.conflist", network)
        path = self.folder / "containerd.toml"
        path.write_text(f"""\
version = 2
root = "{self.folder}/containerd"
state = "/run/containerd"
[grpc]
address = "{self.containerd}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
stream_server_address = "127.0.0.1"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = "{self.folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{os.environ["LIMITED_RUNC"]}"
""")
        return str(path)

    def import_images(self, archive: Path) -> None:
        assert self._ctr("images", "import", str(archive)) is not None
        archive.unlink()

    def start_kubelet(self, kubectl: Kubectl) -> None:
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": NODE,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{CGROUP}",
            "failSwapOn": False,
            "featureGates": {"DevicePlugins": False},
            # The tests do not manage the host's disk.
            "evictionHard": {"memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "resolvConf": "",
        }
        self.start(
            KUBERNETES / "kubelet",
            f"--config={self.write('kubelet.json', config)}",
            f"--kubeconfig={self.kubeconfig}",
            f"--root-dir={self.folder}/kubelet",
            f"--cert-dir={self.folder}/kubelet-certificates",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{self.containerd}",
            f"--hostname-override={NAME}",
            f"--node-ip={NODE}",
            is_ready=lambda: kubectl.try_run(*READY) == "True",
        )

    def start_proxy(self) -> None:
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(self.kubeconfig)},
            "clusterCIDR": PODS,
            # 0 leaves the host's values unchanged.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
            "hostnameOverride": NAME,
            "mode": "iptables",
        }
        self.start(KUBERNETES / "kube-proxy", f"--config={self.write('proxy.json', config)}")


READY = (
    *("get", "node", NAME, "--output"),
    'jsonpath={.status.conditions[?(@.type=="Ready")].status}',
)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def running_node(folder: Path, archive: Path) -> Iterator[Kubectl]:
    """Runs a node, and yields its kubectl once the node is Ready and has the images of ``archive``.

    Its containers end with the process namespace.
    """
    with ExitStack() as ends:
        node = Node(folder, ends)
        kubectl = Kubectl(node.kubeconfig)
        node.start_control_plane(kubectl)
        node.start_containerd()
        node.import_images(archive)
        node.start_kubelet(kubectl)
        node.start_proxy()
        yield kubectl
