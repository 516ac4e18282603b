#!/usr/bin/env bash
# Makes .venv in the checkout, with torch and the tools of requirements-dev.txt.
#   scripts/setup_venv.sh           sets up; quick when all is there already
#   scripts/setup_venv.sh --needs   only prints the Debian packages that are missing for it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv

say() { echo "set-up: $*"; }

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        # Run it: a version manager's shim may exist without a Python behind it.
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    return 1
}

needs() {
    local python
    if python=$(find_python); then
        "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
        "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
            echo python3-dev
    else
        printf '%s\n' python3 python3-venv python3-dev
    fi
    command -v "${CXX:-c++}" >/dev/null || echo g++
    command -v make >/dev/null || echo make
}

install_torch() {
    local version log
    version=$(sed -n 's/^torch==//p' requirements-dev.txt)
    if "$venv/bin/python" - "$version" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
sys.exit(version("torch").split("+")[0] != sys.argv[1])
PY
    then
        say "torch $version is there"
        return
    fi
    say "torch $version: trying the CPU build"
    log=$(mktemp)
    if "$venv/bin/python" -m pip install -qq "torch==$version+cpu" 2>"$log"; then
        say "torch: took the CPU build"
    elif grep -q 'No matching distribution found for torch==' "$log"; then
        say "torch: pip's index offers no CPU build, so this takes the plain wheel, which on x86"
        say "       may be a CUDA build of several GB. To avoid that, stop here, set"
        say "       PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels, and start again."
        "$venv/bin/python" -m pip install "torch==$version"
    else
        cat "$log" >&2
        exit 1
    fi
    rm -f "$log"
}

# NCCL stays as it is where torch brought its own.
install_cuda_tools() {
    local nvcc kept=()
    if ! nvcc=$("$venv/bin/python" scripts/cuda_toolkit.py 2>&1); then
        say "$nvcc; leaving out requirements-cuda.txt"
        return
    fi
    mapfile -t kept < <(sed 's/#.*//' requirements-cuda.txt)
    if "$venv/bin/python" -m pip show -qq nvidia-nccl-cu13 2>/dev/null; then
        mapfile -t kept < <(printf '%s\n' "${kept[@]}" | grep -v '^nvidia-nccl')
    fi
    say "nvcc is $nvcc: tools of requirements-cuda.txt"
    # shellcheck disable=SC2068  # one argument per package, no empty ones
    "$venv/bin/python" -m pip install -qq ${kept[@]}
}

mapfile -t missing < <(needs)
if [[ ${1:-} == --needs ]]; then
    echo "${missing[*]}"
    exit
fi
if ((${#missing[@]})); then
    say "missing on this machine (Python 3.10 or newer and a C++ compiler are needed)" >&2
    say "on Debian: apt install ${missing[*]}" >&2
    exit 1
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    say "making $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
fi
install_torch
say "tools of requirements-dev.txt"
"$venv/bin/python" -m pip install -qq -r requirements-dev.txt
install_cuda_tools
torch=$("$venv/bin/python" -c 'import torch; print(torch.__version__)')
say "done: $venv has torch $torch"
