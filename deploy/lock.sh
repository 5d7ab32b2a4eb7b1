#!/usr/bin/env bash
# Writes deploy/locks/: every package of an image, with its version and the hashes of its files, as
# build-image-env.sh installs them; the newest that the two pyproject.toml allow. KEEP=yes keeps the
# versions of the locks that are there, and adds and removes packages only.
#
# It asks the index that uv is set to. PyTorch's CPU build has an index of its own (UV_INDEX), or lies
# in a folder (UV_FIND_LINKS); the CUDA build is the default index's.
#
# UV names the program. Run from anywhere; needs nothing installed but uv.
set -euo pipefail
cd "$(dirname "$0")/.."

# Writes the lock $1, with the versions that it has where it is there.
compile() {
    "${UV:-uv}" pip compile --quiet --generate-hashes --no-header --no-annotate \
        --no-emit-package embedserve-client --output-file "$made/$1.txt" \
        --python-version 3.11 --python-platform x86_64-manylinux_2_28 "${@:2}"
}

# All that a setting of a pod may need: the image has no pip, and its root is read-only.
extras=(--extra remote --extra otel --extra signatures --extra redis --extra nats)
locks=deploy/locks
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
if [ "${KEEP:-no}" = yes ]; then cp $locks/{cpu,cuda,build}.txt "$made"; fi
compile cpu pyproject.toml "${extras[@]}" --extra cpu
grep -q '^torch==.*+cpu ' "$made/cpu.txt" || {
    echo "lock.sh: no CPU build of PyTorch was found: name its index by UV_INDEX" >&2
    exit 1
}
# Its wheel asks for fbgemm-gpu, the CUDA build; the cpu extra lists its other needs.
echo "torchrec==1.8.0" | compile torchrec --no-deps -
cat "$made/torchrec.txt" >>"$made/cpu.txt"
unset UV_INDEX UV_FIND_LINKS # the others are of the default index
compile cuda pyproject.toml "${extras[@]}" --extra cuda
compile build $locks/build.in
for lock in cpu cuda build; do
    {
        echo "# Made by deploy/lock.sh (make lock): Python 3.11 on Linux, x86_64."
        cat "$made/$lock.txt"
    } >"$locks/$lock.txt"
done
