"""A wrapper of kubectl for one cluster."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from interop.tools import tool

CALL_S_MAX = 120
READY_S_MAX = 600
SERVERS = ("--selector", "app.kubernetes.io/name=embedserve")
COUNTS = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
"""Counts in a Deployment's status, which are equal once a rollout has ended."""


@dataclass(frozen=True)
class Kubectl:
    kubeconfig: Path

    def _call(self, arguments: Sequence[object], stdin: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tool("kubectl"), "--kubeconfig", str(self.kubeconfig), *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=CALL_S_MAX,
        )

    def run(self, *arguments: object, stdin: str = "") -> str:
        done = self._call(arguments, stdin)
        assert done.returncode == 0, f"kubectl {arguments[0]}: {done.stderr}"
        return done.stdout

    def try_run(self, *arguments: object) -> str:
        """Returns the output, including errors. The command may fail, for example without the
        object.
        """
        done = self._call(arguments, "")
        return done.stdout + done.stderr

    def get(self, *what: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("get", *what, "--output", "json"))
        return found

    def apply(self, *manifests: dict[str, Any]) -> None:
        self.run("apply", "--filename", "-", stdin=yaml.safe_dump_all(manifests))

    def in_namespace(self, namespace: str) -> "Namespaced":
        return Namespaced(self, namespace)


@dataclass(frozen=True)
class Namespaced:
    """One namespace with its Deployment."""

    kubectl: Kubectl
    name: str

    def run(self, *arguments: object) -> str:
        return self.kubectl.run("--namespace", self.name, *arguments)

    def get(self, *what: object) -> dict[str, Any]:
        return self.kubectl.get("--namespace", self.name, *what)

    def pods(self) -> list[dict[str, Any]]:
        """Returns the pods that are not being deleted, the oldest first."""
        pods = self.get("pods", *SERVERS, "--sort-by=.metadata.creationTimestamp")["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def wait_until_ready(self, replicas: int) -> float:
        """Waits for ``replicas`` ready pods of the newest template, and returns the seconds."""
        begin = time.monotonic()
        while True:
            deployment = self.get("deployment", "embedserve")
            status = deployment["status"]
            counts = {status.get(name, 0) for name in COUNTS}
            is_observed = status.get("observedGeneration") == deployment["metadata"]["generation"]
            are_ready = [_is_ready(pod) for pod in self.pods()]
            if counts == {replicas} and is_observed and are_ready == [True] * replicas:
                return time.monotonic() - begin
            assert time.monotonic() < begin + READY_S_MAX, self.state()
            time.sleep(0.2)

    def wait_for(self, text: str, *command: object) -> str:
        """Waits until kubectl's output contains ``text``, and returns the output."""
        end = time.monotonic() + READY_S_MAX
        while text not in (output := self.kubectl.try_run("--namespace", self.name, *command)):
            assert time.monotonic() < end, f"no {text!r} in: {output}\n{self.state()}"
            time.sleep(0.5)
        return output

    def wait_for_log(self, text: str) -> str:
        """Waits until the log contains ``text``, also after its container has ended."""
        return self.wait_for(text, "logs", "deployment/embedserve", "--tail=-1")

    def state(self) -> str:
        """Returns descriptions and logs, for the message of a failed test."""
        what = (("describe", "pods"), ("logs", "deployment/embedserve", "--tail=30"))
        return "\n".join(self.kubectl.try_run("--namespace", self.name, *one) for one in what)


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return {"True"} == {one["status"] for one in conditions if one["type"] == "Ready"}


Start = Callable[..., Namespaced]
"""Type of the fixture ``start`` in conftest.py, which starts one pod in a namespace."""
Publish = Callable[[Namespaced], None]
"""Type of the fixture ``publish`` in conftest.py, which starts the publishing Job in that
namespace."""
