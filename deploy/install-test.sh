#!/usr/bin/env bash
# Installs the wheels of a folder as a stranger does, in an empty Debian made by debootstrap with its
# own Python: install, demo, serve, a request, uninstall. Prints seconds and MB of each command, and
# what is left afterwards. Needs root, debootstrap and a package index.
#
# SUITE names Debian's release and MIRROR its archive; EXTRA is cpu or cuda; KEEP=yes leaves the root.
# pip's settings come from PIP_* variables: folders in PIP_FIND_LINKS and the file PIP_CERT are there
# read-only. Mounts are in a namespace of their own, which ends with this script.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
    [ $# -eq 1 ] && [ -d "$1" ] || { echo "usage: install-test.sh FOLDER_OF_WHEELS" >&2; exit 2; }
    [ "$(id -u)" -eq 0 ] || { echo "install-test.sh: needs root, for chroot and mounts" >&2; exit 2; }
    command -v debootstrap >/dev/null || { echo "install-test.sh: apt-get install debootstrap" >&2; exit 2; }
    root=$(mktemp -d)
    # Not before the namespace with its mounts has ended.
    if [ "${KEEP:-no}" = no ]; then trap 'rm -rf --one-file-system "$root"' EXIT; fi
    wheels=$(cd "$1" && pwd -P)
    debootstrap --variant=minbase --include=python3-venv,curl,ca-certificates \
        "${SUITE:-bookworm}" "$root" ${MIRROR:+"$MIRROR"} >"$root.log" 2>&1 ||
        { tail "$root.log" >&2; exit 1; }
    rm "$root.log"
    unshare --mount --propagation private --pid --fork --kill-child "$0" --inside "$root" "$wheels"
    exit
fi

root=$2 wheels=$3
readonly_here() { # PATH, at the same place in the root
    if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root$(dirname "$1")" && touch "$root$1"; fi
    mount --bind "$1" "$root$1"
    mount -o remount,bind,ro "$root$1"
}
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
for path in "$wheels" ${PIP_FIND_LINKS:-} ${PIP_CERT:-}; do
    if [ -e "$path" ]; then readonly_here "$path"; fi
done
cp /etc/resolv.conf "$root/etc/resolv.conf"
export PIP_FIND_LINKS="$wheels ${PIP_FIND_LINKS:-}" HOME=/root LC_ALL=C.UTF-8
export PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/embedserve/bin:/usr/sbin:/usr/bin

used_mb() { # of the disk, without what is mounted
    du -scm "$root"/{opt,srv,root,tmp} | tail -n 1 | cut -f 1
}
measure() { # NAME COMMAND…, in the root
    local begin=$EPOCHREALTIME mb
    mb=$(used_mb)
    chroot "$root" bash -euo pipefail -c "$2" >"$root/tmp/output" 2>&1 || {
        echo "install-test.sh: $1 failed:" >&2
        tail -n 30 "$root/tmp/output" >&2
        exit 1
    }
    awk -v name="$1" -v begin="$begin" -v end="$EPOCHREALTIME" -v mb=$(($(used_mb) - mb)) \
        'BEGIN {printf "%-10s %7.1f s %7d MB\n", name, end - begin, mb}'
}

chroot "$root" python3 --version
torchrec=":"
if [ "${EXTRA:-cpu}" = cpu ]; then torchrec="pip install --no-cache-dir --no-deps torchrec==1.8.0"; fi
measure install "python3 -m venv /opt/embedserve; hash -r
    pip install --no-cache-dir 'embedserve[${EXTRA:-cpu}]'; $torchrec"
chroot "$root" embedserve --version
measure demo "embedserve demo /srv/store"
measure serve "if curl -s -o /dev/null localhost:18000; then echo port 18000 is in use; exit 1; fi
    embedserve serve /srv/store --http-port 18000 --grpc-port 0 >/tmp/serve.log 2>&1 &
    echo \$! >/tmp/pid
    until embedserve health --ready --http-port 18000 2>/dev/null; do kill -0 \$(</tmp/pid); done"
measure request "curl -sS --fail-with-body localhost:18000/embed -d \
    '{\"features\": {\"candidate\": [[1375666]], \"user\": [[37287]]}}' | grep '\"version\":1'"
measure uninstall "kill \$(</tmp/pid); while kill -0 \$(</tmp/pid) 2>/dev/null; do sleep 0.1; done
    rm -r /opt/embedserve /srv/store"
echo "left: $(chroot "$root" find /opt /srv /root /etc/systemd/system -newer /etc/hostname -type f | tr '\n' ' ')"
