"""DistributedDataParallel, which sums the gradients during backward, and torch.optim.Adam."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from ..cases.rs_adam_ag import HYPERPARAMETERS, initial_parameters, layout_counts, load_gradients
from ..model import Buffers, Candidate, Problem
from . import Peer
from .gloo import missing


class _Ready(torch.autograd.Function):
    """A backward pass that costs nothing: it gives gradients that are there already."""

    @staticmethod
    def forward(ctx, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor | None, ...]:
        # new tensors on the same memory, which autograd takes over without a copy
        return None, *(gradient.detach() for gradient in ctx.gradients)


class _Module(torch.nn.Module):
    def __init__(self, parameters: list[Parameter], gradients: list[Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(parameters)
        self._gradients = gradients

    def forward(self) -> Tensor:
        return _Ready.apply(self._gradients, *self.weights)


def rs_adam_ag(problem: Problem, buffers: Buffers) -> list[Candidate]:
    if problem.dtype != torch.float32:
        return []  # parameters of 16 bits need fp32 masters, which neither of the two keeps
    parameters = [Parameter(p) for p in initial_parameters(problem, buffers)]
    gradients = buffers.private("gradients", layout_counts(problem), problem.dtype)
    module = DistributedDataParallel(_Module(parameters, gradients), gradient_as_bucket_view=True)
    adam = torch.optim.Adam(parameters, fused=True, **HYPERPARAMETERS)

    def load() -> None:
        load_gradients(problem, gradients)
        torch._foreach_mul_(gradients, problem.world)  # DDP averages

    def reset() -> None:
        initial_parameters(problem, buffers)
        for state in adam.state.values():
            torch._foreach_zero_(list(state.values()))

    def run() -> None:
        adam.zero_grad()
        module().backward()
        adam.step()

    return [Candidate("ddp + Adam(fused)", load, run, lambda: parameters, reset)]


PEER = Peer(name="ddp", missing=missing, factories={"rs_adam_ag": rs_adam_ag})
