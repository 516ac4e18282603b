"""The emulator's own tests, built without torch; see tests/emulator/README.md."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "emulator"


# ucontext: the fibers of machines that have no assembly for it.
@pytest.mark.parametrize("mode", ["plain", "ucontext"])
def test_emulator(mode):
    # Not the job server of the `make test` that may have started this.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    program = subprocess.run(
        ["make", "--no-print-directory", "-C", FOLDER, "run", f"MODE={mode}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert program.returncode == 0, program.stdout
    assert " 0 failed" in program.stdout
