"""The fused step needs hardly any memory beyond parameters, gradients and the sharded state."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest
import torch
from harness import run_fresh, values

NUMEL = 1 << 22
LIMIT = 64 << 20


def _status(field: str) -> int:
    """Bytes, from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def _memory_of_steps(rehome: bool) -> dict[str, int]:
    from coconet_ops.optim import DistributedFusedAdam

    comm = harness.communicator()
    params = [torch.nn.Parameter(torch.ones(NUMEL)) for _ in range(2)]
    optimizer = DistributedFusedAdam(params, process_group=comm, rehome=rehome)
    for p in params:
        p.sum().backward()
    before = {"anonymous": _status("RssAnon"), "heap": comm._core.heap_resident}
    optimizer.step()
    first = {
        "anonymous": _status("RssAnon") - before["anonymous"],
        "heap": comm._core.heap_resident - before["heap"],
    }
    # Now everything is mapped: whatever a step takes for a while shows in the peak.
    Path("/proc/self/clear_refs").write_text("5")
    resident = _status("VmRSS")
    optimizer.step()
    return {**first, "peak": _status("VmHWM") - resident}


@pytest.mark.parametrize("rehome", [True, False], ids=["heap", "private"])
def test_a_step_takes_little_memory(rehome):
    for used in values(run_fresh(2, _memory_of_steps, rehome)):
        assert all(amount < LIMIT for amount in used.values()), used
