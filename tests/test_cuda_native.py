"""The native tests of csrc/cuda over the emulator, without torch; see tests/cuda/README.md."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent / "cuda"


def test_cuda_native():
    # Not the job server of the `make test` that may have started this.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    program = subprocess.run(
        ["make", "--no-print-directory", "-C", FOLDER, "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert program.returncode == 0, program.stdout
    assert " 0 failed" in program.stdout
