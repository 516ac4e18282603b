"""All variants of the kernels give the same bits."""

from __future__ import annotations

import hashlib

import cases
import harness
import pytest
import torch
from harness import run_fresh, values


def _digest(dtype: torch.dtype) -> tuple[str, str]:
    import torch.distributed as dist

    import coconet_ops as co

    comm = harness.communicator()
    digest = hashlib.sha256()

    def add(t: torch.Tensor) -> None:
        # The payload of a NaN is the processor's affair.
        digest.update(torch.where(t.isnan(), 7.0, t.float()).numpy().tobytes())

    rank = dist.get_rank()
    x = cases.normals((70_001,), torch.float32, rank)
    x = (x * torch.exp(8 * cases.normals((70_001,), torch.float32, rank, seed=1))).to(dtype)
    x[:6] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 6e-8]).to(dtype)
    heap = comm.empty(x.numel(), dtype=dtype).copy_(x)
    for operand in (x, heap, x[1:]):
        add(co.all_reduce(operand, group=comm))
        add(co.reduce_scatter(operand, op="avg", group=comm))
    p = cases.normals((5_001,), dtype, 0)
    state = co.AdamState([p], group=comm)
    for step in range(5):
        grad = cases.normals((5_001,), dtype, rank, seed=step)
        co.rs_adam_ag_([p], [grad], state, lr=1e-2, weight_decay=0.1)
    for t in (p, state.exp_avg, state.exp_avg_sq):
        add(t)
    for other in (torch.float64, torch.int32, torch.int64):
        add(co.all_reduce((1000 * x[6:]).to(other), group=comm))
    return co.build_info()["isa"], digest.hexdigest()


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.name)
def test_all_kernels_agree_with_those_chosen_for_this_processor(dtype, isa):
    native = values(run_fresh(2, _digest, dtype))
    other = values(run_fresh(2, _digest, dtype, environment={"COCONET_ISA": isa}))
    if isa != "portable" and {name for name, _ in other} != {isa}:
        pytest.skip(f"this processor has no {isa}")
    assert {name for name, _ in other} == {isa}
    assert [d for _, d in native] == [d for _, d in other]
