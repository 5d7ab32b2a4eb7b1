"""The host of a node in the namespaces of in_namespace.sh: addresses, folders, cgroups.

kubelet and its helpers write to fixed paths of a host. In the namespaces, empty folders and files
are mounted over these paths, so that the host does not change.
"""

from pathlib import Path

from interop.tools import run_tool

NODE = "10.89.78.1"
"""Address of the node, on loopback, which also routes to Services."""
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
"""Values that kubelet sets for the whole host. Here it finds files with these values."""


def prepare(folder: Path) -> None:
    """Prepares addresses and mounts, once; ``folder`` keeps the sysctls' files."""
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
