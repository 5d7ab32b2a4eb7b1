#!/usr/bin/env bash
# Builds the server's image from the locks: deploy/Dockerfile, by podman or docker. Where no image
# registry can be reached, BASE=debootstrap makes the base out of Debian's packages (bookworm, whose
# Python is the locks' 3.11) and imports it under a local name; it is made once.
#
# ENGINE names the program (docker where it has an engine, else podman), VARIANT is cpu or cuda, BASE
# another base image. Arguments are passed on to "ENGINE build": where pip finds its wheels, say.
set -euo pipefail
cd "$(dirname "$0")/.."

variant=${VARIANT:-cpu}
local_base=localhost/embedserve-base:bookworm

find_engine() {
    if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
        echo docker
    elif command -v podman >/dev/null; then
        echo podman
    else
        echo "build-image.sh: neither docker with an engine nor podman is here:" \
            "deploy/install-debian-packages.sh image" >&2
        exit 1
    fi
}

make_base() {
    command -v debootstrap >/dev/null || {
        echo "build-image.sh: debootstrap is missing: deploy/install-debian-packages.sh image" >&2
        exit 1
    }
    made=$(mktemp -d)
    trap 'rm -rf "$made"' EXIT
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
        bookworm "$made" ${MIRROR:+"$MIRROR"}
    # As in Debian's slim images: what no program reads.
    rm -rf "$made"/var/{cache/apt,lib/apt/lists,log}/* \
        "$made"/usr/share/{doc,info,locale,man}/*
    tar -C "$made" -c . | "$engine" import \
        --change "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
        - "$local_base"
}

engine=${ENGINE:-$(find_engine)}
base=()
if [ "${BASE:-}" = debootstrap ]; then
    "$engine" image inspect "$local_base" >/dev/null 2>&1 || make_base
    BASE=$local_base
fi
if [ -n "${BASE:-}" ]; then base=(--build-arg "${variant^^}_IMAGE=$BASE"); fi
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' proto/embedserve_proto/__init__.py)
"$engine" build --file deploy/Dockerfile --build-arg "VARIANT=$variant" "${base[@]}" \
    --tag "${IMAGE:-localhost/embedserve:$version-$variant}" "$@" .
