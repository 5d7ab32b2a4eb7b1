"""What a node finds on its host, in the namespaces of in_namespace.sh: addresses, folders, cgroups.

Kubelet and its helpers write to fixed places of a host. In the namespaces empty folders and files
lie over them, so that nothing of the host changes.
"""

from __future__ import annotations

from pathlib import Path

from interop.tools import run_tool

NODE = "10.89.78.1"
"""The node's address; on loopback, with the route to Services."""
PODS = "10.89.79.0/24"
SERVICES = "10.89.80.0/24"
CGROUP = "embedserve"
"""Parent of all pods' cgroups; in_namespace.sh removes it."""
CGROUPS = Path("/sys/fs/cgroup")
EMPTY_FOLDERS = ("/run", "/var/lib", "/var/log")
SYSCTLS = {
    "kernel/keys/root_maxbytes": 25_000_000,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
}
"""Values that kubelet sets for the whole host; here it finds files that have them."""


def prepare(folder: Path) -> None:
    """Lays everything out, once; ``folder`` keeps the files of sysctls."""
    run_tool("ip", "address", "add", f"{NODE}/32", "dev", "lo")
    run_tool("ip", "route", "add", SERVICES, "dev", "lo", "src", NODE)
    for path in EMPTY_FOLDERS:
        run_tool("mount", "-t", "tmpfs", "tmpfs", path)
    folder.mkdir()
    for name, value in SYSCTLS.items():
        file = folder / name.replace("/", ".")
        file.write_text(f"{value}\n")
        run_tool("mount", "--bind", file, Path("/proc/sys") / name)
    for hierarchy in CGROUPS.iterdir():
        if (hierarchy / "cgroup.procs").exists():
            (hierarchy / CGROUP).mkdir(exist_ok=True)
