"""ZeroRedundancyOptimizer over gloo: each rank updates some parameters and broadcasts them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ..cases.rs_adam_ag import (
    HYPERPARAMETERS,
    PARAMETER_SEED,
    initial_parameters,
    layout_counts,
    load_gradients,
)
from ..check import fill, tile
from ..model import Buffers, Candidate, Problem
from . import Peer
from .gloo import missing


def rs_adam_ag(problem: Problem, buffers: Buffers) -> list[Candidate]:
    """all_reduce of one flat gradient, then the optimizer's step."""
    if problem.dtype != torch.float32:
        return []  # it keeps no fp32 master weights
    return [
        _step(problem, buffers, "gloo + ZeRO(Adam fused)", in_buckets=False),
        _step(problem, buffers, "gloo + ZeRO(Adam fused) buckets", in_buckets=True),
    ]


def _step(problem: Problem, buffers: Buffers, name: str, in_buckets: bool) -> Candidate:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes seconds

    parameters = [Parameter(p) for p in initial_parameters(problem, buffers)]
    (flat,) = buffers.private("flat gradient", [problem.count], problem.dtype)
    gradients = list(flat.split(layout_counts(problem)))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = ZeroRedundancyOptimizer(
        parameters,
        optimizer_class=torch.optim.Adam,
        parameters_as_bucket_view=in_buckets,
        fused=True,
        **HYPERPARAMETERS,
    )

    def reset() -> None:
        fill([p.data for p in parameters], tile(PARAMETER_SEED, problem.dtype))
        for state in optimizer.optim.state.values():
            torch._foreach_zero_(list(state.values()))

    def run() -> None:
        dist.all_reduce(flat)
        optimizer.step()

    return Candidate(
        name, lambda: load_gradients(problem, gradients), run, lambda: parameters, reset
    )


PEER = Peer(name="zero", missing=missing, factories={"rs_adam_ag": rs_adam_ag})
