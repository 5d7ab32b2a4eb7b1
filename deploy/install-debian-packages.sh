#!/usr/bin/env bash
# Installs Debian's kubernetes-client when kubectl is missing; the tests render the manifests
# with it. It does nothing where kubectl is there, and never touches a cluster.
set -euo pipefail

fail() {
    echo "install-debian-packages.sh: kubectl is missing and $*" >&2
    exit 1
}

if command -v kubectl >/dev/null; then exit 0; fi
command -v apt-get >/dev/null || fail "this host has no apt-get: install kubectl by hand"

as_root=(env DEBIAN_FRONTEND=noninteractive)
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "there is no sudo: install kubernetes-client as root"
    as_root=(sudo env DEBIAN_FRONTEND=noninteractive)
fi
"${as_root[@]}" apt-get update -qq || fail "apt-get update failed (its output is above)"
"${as_root[@]}" apt-get install -qq -y --no-install-recommends kubernetes-client ||
    fail "apt-get could not install kubernetes-client (its output is above)"
