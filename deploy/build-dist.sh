#!/usr/bin/env bash
# Builds wheels and sdists of embedserve and embedserve-client into FOLDER, which it makes anew. The same
# tree gives the same bytes: files have the commit's time (SOURCE_DATE_EPOCH overrides it), and the
# builder is that of deploy/locks/build.txt. PYTHON names an interpreter with pip and twine.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: build-dist.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd -P)
cd "$(dirname "$0")/.."
rm -f "$folder"/embedserve[-_]*
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}

# One environment with hatchling alone builds all four: an environment for each takes most of the time.
python=${PYTHON:-python3}
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"$python" -m venv --without-pip "$tools"
pip() { "$python" -m pip --python "$tools/bin/python" "$@"; }
pip install --quiet --no-compile --constraint deploy/locks/build.txt hatchling
for project in clients .; do
    (cd "$project" && "$tools/bin/python" -m hatchling build --target sdist --directory "$folder")
done
# Each wheel from its sdist. pip would take an older wheel of an sdist of that path from its cache.
pip wheel --quiet --no-cache-dir --no-deps --no-build-isolation --check-build-dependencies \
    --wheel-dir "$folder" "$folder"/*.tar.gz
"$python" -m twine check --strict "$folder"/*
