#!/usr/bin/env bash
# Writes deploy/locks/: every package of an image, with its version and the hashes of its files, as
# build-image-env.sh installs them; the newest that the two pyproject.toml allow. It asks the index that uv
# is set to. PyTorch's CPU build has an index of its own (UV_INDEX), or lies in a folder
# (UV_FIND_LINKS); the CUDA build is the default index's.
#
# UV names the program. Run from anywhere; needs nothing installed but uv.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
    "${UV:-uv}" pip compile --quiet --generate-hashes --no-header --no-annotate \
        --no-emit-package embedserve-client \
        --python-version 3.11 --python-platform x86_64-manylinux_2_28 "$@"
}

locks=deploy/locks
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
compile pyproject.toml --extra remote --extra cpu >"$made/cpu.txt"
grep -q '^torch==.*+cpu ' "$made/cpu.txt" || {
    echo "lock.sh: no CPU build of PyTorch was found: name its index by UV_INDEX" >&2
    exit 1
}
# Its wheel asks for fbgemm-gpu, the CUDA build; the cpu extra lists its other needs.
echo "torchrec==1.8.0" | compile --no-deps - >>"$made/cpu.txt"
unset UV_INDEX UV_FIND_LINKS # the others are of the default index
compile pyproject.toml --extra remote --extra cuda >"$made/cuda.txt"
compile $locks/build.in >"$made/build.txt"
for lock in cpu cuda build; do
    {
        echo "# Made by deploy/lock.sh (make lock): Python 3.11 on Linux, x86_64."
        cat "$made/$lock.txt"
    } >"$locks/$lock.txt"
done
