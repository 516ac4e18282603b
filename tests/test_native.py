"""The native tests of csrc/cpu, built without torch; see tests/native/README.md."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "native"


@pytest.mark.parametrize("isa", ["best", "portable"])
def test_native(isa):
    # Not the job server of the `make test` that may have started this.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    environment["COCONET_ISA"] = isa
    program = subprocess.run(
        ["make", "--no-print-directory", "-C", FOLDER, "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert program.returncode == 0, program.stdout
    assert " 0 failed" in program.stdout
