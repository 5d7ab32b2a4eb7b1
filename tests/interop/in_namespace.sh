#!/usr/bin/env bash
# Runs a command, as root, in a network namespace with loopback alone, where podman starts pods: they
# reach each other over a bridge in it, and nothing outside. Nothing of the host is changed: mounts
# are the namespace's own, and podman's files are in a folder that goes with it, except the image.
#
# Some hosts limit root, and have hierarchies of cgroups (version 1) that are mounted nowhere:
# they are mounted here, and runc is called without the limits that it may not set.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
    exec unshare --net --mount --propagation private "$0" --inside "$@"
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
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
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
# Podman leaves probes to systemd; the tests ask them instead.
DISABLE_HC_SYSTEMD=true CONTAINERS_CONF=$made/containers.conf "$@"
