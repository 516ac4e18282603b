"""Unfused optimizer steps: a collective, Adam, and perhaps another collective.

The gradients are views of one flat tensor (DDP's gradient_as_bucket_view): nothing is packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..cases.rs_adam_ag import (
    HYPERPARAMETERS,
    PARAMETER_SEED,
    initial_parameters,
    layout_counts,
    load_gradients,
)
from ..check import fill, tile
from ..model import Buffers, Candidate, Problem


class Adam(Protocol):
    """Updates tensors in place from their gradients."""

    leeway: float

    def __init__(self, parameters: list[Tensor], gradients: list[Tensor]) -> None: ...
    def reset(self) -> None: ...
    def step(self) -> None: ...


class TorchAdam:
    """torch's fused Adam; 16-bit parameters get fp32 masters, as in mixed-precision training."""

    leeway = 1.0

    def __init__(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        self._parameters, self._gradients = parameters, gradients
        self._mixed = parameters[0].dtype != torch.float32
        self._masters = [p.float() for p in parameters]  # the same tensors where fp32
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = torch.empty_like(master) if self._mixed else gradient
        self._adam = torch.optim.Adam(self._masters, fused=True, **HYPERPARAMETERS)

    def reset(self) -> None:
        if self._mixed:
            torch._foreach_copy_(self._masters, self._parameters)
        for state in self._adam.state.values():
            torch._foreach_zero_(list(state.values()))

    def step(self) -> None:
        if self._mixed:
            torch._foreach_copy_([m.grad for m in self._masters], self._gradients)
        self._adam.step()
        if self._mixed:
            torch._foreach_copy_(self._parameters, self._masters)


def whole_step(
    problem: Problem,
    buffers: Buffers,
    name: str,
    all_reduce: Callable[[Tensor], None],
    adam: type[Adam] = TorchAdam,
) -> Candidate:
    """all_reduce of the flat gradient, then every rank updates all parameters."""
    counts = layout_counts(problem)
    parameters = initial_parameters(problem, buffers)
    (flat,) = buffers.private("flat gradient", [problem.count], problem.dtype)
    gradients = list(flat.split(counts))
    optimizer = adam(parameters, gradients)

    def reset() -> None:
        initial_parameters(problem, buffers)
        optimizer.reset()

    def run() -> None:
        all_reduce(flat)
        optimizer.step()

    return Candidate(
        name,
        load=lambda: load_gradients(problem, gradients),
        run=run,
        result=lambda: parameters,
        reset=reset,
        leeway=adam.leeway,
    )


def slice_step(
    problem: Problem,
    buffers: Buffers,
    name: str,
    reduce: Callable[[Tensor, Tensor], None],
    all_gather_: Callable[[Tensor], None],
    adam: type[Adam] = TorchAdam,
    in_place: bool = False,
) -> Candidate:
    """Every rank updates its slice of the flat parameters, as ZeRO does.

    reduce(flat gradient, slice) gives the slice of the sum, which is a view of the flat gradient
    where `in_place`; all_gather_(flat parameters) spreads the slices.
    """
    counts = layout_counts(problem)
    size = -(-problem.count // problem.world)
    own = slice(problem.rank * size, (problem.rank + 1) * size)
    padded = [size * problem.world]
    (weights,) = buffers.private("flat parameters", padded, problem.dtype)
    (flat,) = buffers.private("flat gradient", padded, problem.dtype)
    (apart,) = buffers.private("shard", [size], problem.dtype)
    shard = flat[own] if in_place else apart
    parameters = list(weights[: problem.count].split(counts))
    gradients = list(flat[: problem.count].split(counts))
    optimizer = adam([weights[own]], [shard])

    def reset() -> None:
        weights.zero_()
        fill(parameters, tile(PARAMETER_SEED, problem.dtype))
        optimizer.reset()

    def load() -> None:
        flat[problem.count :].zero_()
        load_gradients(problem, gradients)

    def run() -> None:
        reduce(flat, shard)
        optimizer.step()
        all_gather_(weights)

    return Candidate(name, load, run, lambda: parameters, reset, leeway=adam.leeway)
