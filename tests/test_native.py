"""The native tests, built without torch: of csrc/cpu, of the emulator, and of csrc/cuda over it.
Each folder has a README.md."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("folder", "mode", "isa"),
    [
        ("native", "plain", "best"),
        ("native", "plain", "portable"),
        ("emulator", "plain", ""),
        ("emulator", "ucontext", ""),  # the fibers of machines that have no assembly for it
        ("cuda", "plain", ""),
    ],
)
def test_native(folder, mode, isa):
    # Not the job server of the `make test` that may have started this.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    environment["COCONET_ISA"] = isa
    program = subprocess.run(
        [
            "make",
            "--no-print-directory",
            "-C",
            Path(__file__).parent / folder,
            "run",
            f"MODE={mode}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert program.returncode == 0, program.stdout
    assert " 0 failed" in program.stdout
