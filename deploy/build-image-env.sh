#!/usr/bin/env bash
# Makes the virtual environment of an image: builds the tree's wheel and installs it with
# PyTorch and TorchRec for the variant. Where packages come from is left to pip's own settings
# (pip.conf, PIP_EXTRA_INDEX_URL). It never writes into SOURCE and never updates an environment.
#
# --dry-run prints the commands and runs none; WITH_DEPENDENCIES=no installs the wheel alone;
# PYTHON names the interpreter (python3 by default).
set -euo pipefail

usage="usage: build-image-env.sh [--dry-run] cpu|cuda PREFIX SOURCE"

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
    run "$prefix/bin/python" -m pip install "$@"
}

# pip takes PyTorch's CUDA build for the CPU one where its index has no other.
check_torch() {
    run "$prefix/bin/python" -c "import sys, torch
built = 'cuda' if torch.version.cuda else 'cpu'
if built != '$variant':
    sys.exit(f'PyTorch {torch.__version__} is built for {built}, VARIANT is $variant: '
             'point PIP_EXTRA_INDEX_URL at the $variant wheels of PyTorch')"
}

# --no-deps on torchrec leaves its needs to the cpu extra; the import shows that none is missing.
install_cpu() {
    install "$source[server,remote,cpu]"
    check_torch
    install --no-deps torchrec==1.8.0
    run "$prefix/bin/python" -c "import torchrec"
}

install_cuda() {
    install "$source[server,remote,cuda]"
    check_torch
}

install_wheel() {
    install --no-deps "$source"
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
    yes) install_env=install_$variant ;;
    no) install_env=install_wheel ;;
    *) fail "WITH_DEPENDENCIES is \"$WITH_DEPENDENCIES\", it must be yes or no" ;;
esac

run "${PYTHON:-python3}" -m venv "$prefix"
"$install_env"
