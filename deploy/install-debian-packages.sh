#!/usr/bin/env bash
# Installs from Debian what the tests run and this host lacks: kubectl (1.24) renders the manifests; curl,
# nghttp, h2load, grpc-go and Node's gRPC ask the server; nginx and HAProxy stand before it, Prometheus
# scrapes it, Chromium shows its console, and Redis and NATS notify it of deltas. With the argument "image" it
# installs what builds the image and starts it instead, with "cluster" what builds Kubernetes and runs one node of
# it. It does nothing where all are there, never touches a cluster, and leaves no service running or enabled.
set -euo pipefail

OS_RELEASE=${OS_RELEASE:-/etc/os-release}
# Debian's servers are there, which is not on every user's PATH.
SBIN=${SBIN:-/usr/sbin}
# Debian's plugins for the networks of containers.
CNI=${CNI:-/usr/lib/cni}
PATH=$PATH:$SBIN:$CNI
source "${BASH_SOURCE[0]%/*}/debian-archive.sh"

declare -A package_of=(
    [curl]=curl
    [nghttp]=nghttp2-client
    [h2load]=nghttp2-client
    [nginx]=nginx-light
    [haproxy]=haproxy
    [node]=nodejs
    [npm]=npm
    [go]=golang-go
    [prometheus]=prometheus
    [promtool]=prometheus
    [chromium-headless-shell]=chromium-headless-shell
    [redis-server]=redis-server
    [nats-server]=nats-server
    [podman]=podman
    [runc]=runc
    [debootstrap]=debootstrap
    [etcd]=etcd-server
    [containerd]=containerd
    [catatonit]=catatonit
    [iptables]=iptables
    [host-local]=containernetworking-plugins
    [dpkg-source]=dpkg-dev
)

fail() {
    echo "install-debian-packages.sh: ${missing[*]}: not here, and $*" >&2
    exit 1
}

has_grpc_go() {
    GO111MODULE=off GOFLAGS='' GOPATH=/usr/share/gocode go list -find google.golang.org/grpc
}

# Before 1.24 kubectl renders no components that change hidden resources.
has_old_kubectl() {
    [[ $(kubectl version --client --output json) =~ \"minor\":\ \"(1?[0-9]|2[0-3])\" ]]
}

is_debian_12() {
    grep -qx VERSION_CODENAME=bookworm "$OS_RELEASE"
}

# Debian 12's is 1.20. Debian 13's, from the same mirror, needs only the C library of 12.
install_kubectl_of_debian_13() {
    local folder
    folder=$(mktemp -d)
    know_release "$folder" deb trixie
    "${as_root[@]}" apt-get "${archive[@]}" update -qq || fail "apt-get update failed (its output is above)"
    "${as_root[@]}" apt-get "${archive[@]}" install -qq -y --no-install-recommends kubectl ||
        fail "apt-get could not install Debian 13's kubectl (its output is above)"
    "${as_root[@]}" rm -rf "$folder"
}

group=${1:-tests}
case $group in
    tests)
        commands=(curl nghttp h2load nginx haproxy node npm go prometheus promtool chromium-headless-shell)
        commands+=(redis-server nats-server)
        ;;
    image) commands=(haproxy podman runc debootstrap) ;;
    cluster) commands=(podman runc etcd containerd catatonit iptables host-local go dpkg-source) ;;
    *)
        echo "install-debian-packages.sh: the group is \"$group\", it must be tests, image or cluster" >&2
        exit 2
        ;;
esac

missing=()
packages=()
needs_kubectl=no
if ! command -v kubectl >/dev/null || has_old_kubectl; then
    missing+=(kubectl)
    if is_debian_12; then needs_kubectl=yes; else packages+=(kubernetes-client); fi
fi
for command in "${commands[@]}"; do
    if ! command -v "$command" >/dev/null; then
        missing+=("$command")
        package=${package_of[$command]}
        [[ " ${packages[*]} " == *" $package "* ]] || packages+=("$package")
    fi
done
if [ "$group" = tests ] && ! has_grpc_go >/dev/null 2>&1; then
    missing+=(grpc-go)
    packages+=(golang-google-grpc-dev)
fi
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi
# Podman's networks and the first process of its pods, which it only recommends.
if [[ " ${missing[*]} " == *" podman "* ]]; then
    packages+=(netavark aardvark-dns catatonit containernetworking-plugins)
fi

command -v apt-get >/dev/null || fail "this host has no apt-get: install by hand"
as_root=(env DEBIAN_FRONTEND=noninteractive)
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "there is no sudo: install ${packages[*]} as root"
    as_root=(sudo env DEBIAN_FRONTEND=noninteractive)
fi

# Debian starts a service as its package is installed, unless this file says no.
policy=$SBIN/policy-rc.d
if [ ! -e "$policy" ]; then
    "${as_root[@]}" sh -c 'printf "#!/bin/sh\nexit 101\n" >"$1" && chmod 755 "$1"' sh "$policy"
    trap '"${as_root[@]}" rm -f "$policy"' EXIT
fi
if [ "$needs_kubectl" = yes ]; then install_kubectl_of_debian_13; fi
if [ ${#packages[@]} -gt 0 ]; then
    "${as_root[@]}" apt-get update -qq || fail "apt-get update failed (its output is above)"
    "${as_root[@]}" apt-get install -qq -y --no-install-recommends "${packages[@]}" ||
        fail "apt-get could not install ${packages[*]} (its output is above)"
fi
# Nor at the next start of the host.
if command -v systemctl >/dev/null; then
    for service in nginx haproxy prometheus redis-server nats-server etcd containerd; do
        if [[ " ${missing[*]} " == *" $service "* ]]; then
            "${as_root[@]}" systemctl disable --quiet "$service"
        fi
    done
    if [[ " ${missing[*]} " == *" podman "* ]]; then
        "${as_root[@]}" systemctl disable --quiet podman.service podman.socket \
            podman-restart.service podman-auto-update.service podman-auto-update.timer
    fi
fi
