#!/usr/bin/env bash
# Makes the virtual environment of an image: the packages of deploy/locks/VARIANT.txt, each by its
# hash, and the tree's own wheels. Takes out what no server reads, and lists what is left in
# PREFIX/sbom.cdx.json (CycloneDX). Where packages come from is left to pip's own settings
# (pip.conf, PIP_EXTRA_INDEX_URL). It never writes into SOURCE and never updates an environment.
#
# --dry-run prints the commands and runs none; WITH_DEPENDENCIES=no installs the wheels alone;
# PYTHON names the interpreter (python3 by default).
set -euo pipefail

usage="usage: build-image-env.sh [--dry-run] cpu|cuda PREFIX SOURCE"
aws_services="s3|signin|sso|sso-oidc|sts"
locks=$(cd "$(dirname "$0")/locks" && pwd -P)

fail() {
    echo "build-image-env.sh: $*" >&2
    exit 2
}

run() {
    printf '%q ' "$@"
    echo
    if [ "$dry_run" = no ]; then "$@"; fi
}

install() {
    run env "PIP_PYTHON=$prefix/bin/python" "$tools/bin/python" -m pip install --no-deps "$@"
}

# --no-deps: the lock has all, and torchrec's wheel asks for the CUDA build of FBGEMM.
install_lock() {
    install --require-hashes --requirement "$locks/$variant.txt"
}

# pip takes another build of PyTorch where the lock was made so.
check_torch() {
    run "$prefix/bin/python" -c "import sys, torch
built = 'cuda' if torch.version.cuda else 'cpu'
if built != '$variant':
    sys.exit(f'PyTorch {torch.__version__} is built for {built}, VARIANT is $variant')"
}

# pip, hatchling, which makes the wheels, and cyclonedx-py stay out of the environment.
# ensurepip makes pip, which Debian's Python lacks.
make_tools() {
    run "${PYTHON:-python3}" -m venv "$tools"
    run "$tools/bin/python" -m pip install --no-compile --no-deps \
        --require-hashes --requirement "$locks/build.txt"
}

install_wheels() {
    run "$tools/bin/python" -m pip wheel --no-deps --no-build-isolation \
        --wheel-dir "$tools/wheels" "$source/clients" "$source"
    install --no-index --find-links "$tools/wheels" embedserve-client embedserve
}

# PyTorch's own tests, the headers to compile against it, the largest of others' tests (some packages
# import their own) and descriptions of AWS' services are not read by a server: a store needs S3, its
# credentials the others that stay. What is left is seen to import.
slim() {
    local site
    site=$(echo "$prefix"/lib/python3*/site-packages)
    run rm -rf "$site"/torch/{include,share,test}
    run find "$site" -path "$site/torch/bin/*" -type f ! -name torch_shm_manager -delete
    run find "$site"/{mpmath,networkx,numpy,sympy} -type d -name tests -prune -exec rm -rf "{}" +
    run find "$site/botocore/data" -mindepth 1 -maxdepth 1 -type d \
        -regextype egrep ! -regex ".*/($aws_services)" -exec rm -rf "{}" +
    check_torch
    run "$prefix/bin/python" -c "import botocore.session, cryptography.hazmat.primitives.serialization
import s3fs, torchrec.distributed
for service in '$aws_services'.split('|'):
    botocore.session.get_session().create_client(service, region_name='eu-west-1')"
}

list_packages() {
    run "$tools/bin/cyclonedx-py" environment --output-reproducible \
        --output-file "$prefix/sbom.cdx.json" "$prefix/bin/python"
}

dry_run=no
if [ "${1:-}" = --dry-run ]; then
    dry_run=yes
    shift
fi
[ $# -eq 3 ] || fail "got $# arguments; $usage"
variant=$1 prefix=$2 source=$3
case $variant in
    cpu | cuda) ;;
    *) fail "VARIANT is \"$variant\", it must be cpu or cuda; $usage" ;;
esac
[ ! -e "$prefix" ] || fail "PREFIX $prefix exists; the environment is made anew, remove it first"
[ -f "$source/pyproject.toml" ] || fail "SOURCE $source holds no pyproject.toml"
source=$(cd "$source" && pwd -P) # pip takes a bare name for a package of its index
case ${WITH_DEPENDENCIES:-yes} in
    yes) has_dependencies=yes ;;
    no) has_dependencies=no ;;
    *) fail "WITH_DEPENDENCIES is \"$WITH_DEPENDENCIES\", it must be yes or no" ;;
esac

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
make_tools
run "${PYTHON:-python3}" -m venv --without-pip "$prefix"
if [ "$has_dependencies" = yes ]; then install_lock; fi
install_wheels
if [ "$has_dependencies" = yes ]; then slim; fi
list_packages
