#!/usr/bin/env bash
# Runs a command, as root, in a network namespace with only loopback. Podman or kubelet starts pods in it,
# which reach each other over a bridge, and nothing outside. The host does not change: mounts belong to the
# namespace, and podman's files, except the image, are in a folder that is removed with it. The processes
# are in a process namespace, so that anything that ends this script, even kill -9, ends all of them. The
# script removes the folder ("$NAMESPACE_FOLDER", build/namespace) and the control groups "embedserve",
# which pods leave behind, before and after.
#
# Some hosts limit root, and have cgroup hierarchies (version 1) that are not mounted. The script mounts
# them, and calls runc ("$LIMITED_RUNC") without the limits that it may not set.
set -euo pipefail

made=$(cd "$(dirname "$0")/../.." && pwd -P)/build/namespace
remove_leftovers() {
    rm -rf --one-file-system "$made"
    for folder in /sys/fs/cgroup/embedserve /sys/fs/cgroup/*/embedserve; do
        if [ -d "$folder" ]; then find "$folder" -depth -type d -exec rmdir {} +; fi
    done
}

if [ "${1:-}" != --inside ]; then
    mkdir -p "${made%/*}"
    exec 9>"$made.lock"
    flock --nonblock 9 || { echo "in_namespace.sh: another test uses $made" >&2; exit 1; }
    remove_leftovers
    trap remove_leftovers EXIT
    mkdir -p "$made"
    # A job with its own process group: a signal reaches it once, through the trap. That also holds if
    # this script was started in the background, where Ctrl-C is ignored.
    set -m
    env --default-signal=INT setpriv --pdeathsig KILL unshare --net --mount --propagation private \
        --pid --fork --kill-child --mount-proc "$0" --inside "$@" &
    trap 'kill -INT -- "-$!"' INT TERM HUP
    status=0
    while kill -0 "$!" 2>/dev/null; do
        wait "$!" && status=0 || status=$?
    done
    exit "$status"
fi
shift
ip link set lo up
if [ "$(stat -f -c %T /sys/fs/cgroup)" = tmpfs ]; then
    for hierarchy in "net_cls,net_prio" perf_event hugetlb; do
        folder=/sys/fs/cgroup/$hierarchy
        if [ -d "$folder" ] && ! mountpoint -q "$folder"; then
            mount -t cgroup -o "$hierarchy" cgroup "$folder"
        fi
    done
fi
cat >"$made/runc" <<'RUNC'
#!/usr/bin/env python3
"""runc, with the limits that this process has."""
import json, os, sys
args = sys.argv
path = None
if "--bundle" in args:
    path = os.path.join(args[args.index("--bundle") + 1], "config.json")
elif "--process" in args:
    path = args[args.index("--process") + 1]
if path:
    with open(path) as file:
        config = json.load(file)
    config.get("process", config)["rlimits"] = []
    with open(path, "w") as file:
        json.dump(config, file)
os.execvp("runc", ["runc", *args[1:]])
RUNC
chmod 755 "$made/runc"
cat >"$made/containers.conf" <<CONF
[engine]
runtime = "limited"
[engine.runtimes]
limited = ["$made/runc"]
CONF
# Podman leaves probes to systemd; the tests run them instead.
export DISABLE_HC_SYSTEMD=true CONTAINERS_CONF=$made/containers.conf
export NAMESPACE_FOLDER=$made LIMITED_RUNC=$made/runc
"$@"
