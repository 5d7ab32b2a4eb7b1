#!/usr/bin/env bash
# Builds Kubernetes' apiserver, controller-manager, scheduler, kubelet and kube-proxy into FOLDER.
# Debian's Go builds them from Debian 12's source package, which is complete: nothing else is downloaded.
# The build omits cloud providers and Docker, which one node does not need. The script does nothing if
# all five programs exist, and continues an interrupted build.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: build_kubernetes.sh FOLDER" >&2; exit 2; }
source "$(dirname "$0")/../../../deploy/debian-archive.sh"
mkdir -p "$1"
folder=$(cd "$1" && pwd -P)
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy)

fail() {
    echo "build_kubernetes.sh: $*" >&2
    exit 1
}

if [ -e "$folder/built" ]; then exit 0; fi
grep -qx VERSION_CODENAME=bookworm /etc/os-release || fail "needs Debian 12, whose source package is whole"
for command in apt-get dpkg-source go; do
    command -v "$command" >/dev/null || fail "$command is missing: deploy/install-debian-packages.sh cluster"
done

build=$folder/build
source=$build/src/k8s.io/kubernetes
begin=$SECONDS
mkdir -p "$build/apt"
if [ ! -e "$build/extracted" ]; then
    know_release "$build/apt" deb-src bookworm
    apt-get "${archive[@]}" update -qq || fail "apt-get update failed (its output is above)"
    echo "Kubernetes is built in $folder. Downloads from Debian:"
    (cd "$build" && apt-get "${archive[@]}" source --print-uris --only-source kubernetes) |
        awk '/^.http/ {printf "    %s, %.1f MB\n", $2, $3 / 1e6}'
    (cd "$build" && apt-get "${archive[@]}" source -qq --download-only --only-source kubernetes) ||
        fail "apt-get source failed (its output is above)"
    rm -rf "$source"
    mkdir -p "$(dirname "$source")"
    dpkg-source --extract "$build"/kubernetes_*.dsc "$source" >/dev/null
    touch "$build/extracted"
fi
version=$(sed -n 's/^Version: .*really\([0-9.]*\)-.*/\1/p' "$build"/kubernetes_*.dsc)
[ -n "$version" ] || fail "no version in $(echo "$build"/kubernetes_*.dsc)"
IFS=. read -r major minor _ <<<"$version"
echo "Kubernetes $version was unpacked after $((SECONDS - begin)) s; the build takes some minutes."

# Go uses the source's vendor folder, without modules and without a module proxy.
export GO111MODULE=off GOFLAGS= GOPROXY=off GOPATH=$build GOCACHE=$build/cache CGO_ENABLED=0
component=k8s.io/kubernetes/vendor/k8s.io/component-base/version
cd "$source"

# The source lacks only the code that describes the API; its own generator writes that code.
api=k8s.io/kubernetes/pkg/generated/openapi
if [ ! -e "$build/generated" ]; then
    go build -o "$build/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    described=$(grep --recursive --files-with-matches --include '*.go' '+k8s:openapi-gen=' pkg staging/src/k8s.io |
        grep --invert-match -e /code-generator/ -e /sample-apiserver/ | xargs dirname | sort --unique |
        sed 's|^staging/src/|vendor/|; s|^|k8s.io/kubernetes/|' | paste --serial --delimiters ,)
    "$build/openapi-gen" --input-dirs "$described" --output-package "$api" --report-filename /dev/null \
        --output-file-base zz_generated.openapi --go-header-file hack/boilerplate/boilerplate.generatego.txt
    touch "$build/generated"
fi
go build -tags providerless,dockerless -trimpath -o "$folder/" \
    -ldflags "-s -w -X $component.gitVersion=v$version -X $component.gitMajor=$major -X $component.gitMinor=$minor" \
    "${programs[@]/#/./cmd/}"
cd "$folder"
rm -rf "$build"
touch built
echo "Kubernetes $version was built in $((SECONDS - begin)) s: $(du -shc "${programs[@]}" | tail -n 1 | cut -f 1) in $folder."
