#!/usr/bin/env bash
# Builds wheels and sdists of embedserve and embedserve-client into FOLDER, which it makes anew. The same
# tree gives the same bytes: files have the commit's time (SOURCE_DATE_EPOCH overrides it), and the
# builder is that of deploy/locks/build.txt. PYTHON names an interpreter with build and twine.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: build-dist.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd -P)
cd "$(dirname "$0")/.."
rm -f "$folder"/embedserve[-_]*
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export PIP_CONSTRAINT=deploy/locks/build.txt
for project in clients .; do
    "${PYTHON:-python3}" -m build --outdir "$folder" "$project" # each wheel from its sdist
done
"${PYTHON:-python3}" -m twine check --strict "$folder"/*
