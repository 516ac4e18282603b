"""all_reduce, sum, in place: x = Σ_r x_r on every rank.

Floor: a rank loads its slice (1/W of n bytes) from W ranks and stores it to W ranks: 2 n bytes,
whatever W is. One rank alone has nothing to do.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import coconet_ops as co

from ..check import fill, tile
from ..model import Buffers, Candidate, Case, Expected, Problem

CPP_BYTES = 64 << 10  # up to here the call from Python takes a good part of the time


def candidates(problem: Problem, buffers: Buffers) -> list[Candidate]:
    values = tile(problem.rank, problem.dtype)

    def in_place(name: str, allocate) -> list[Candidate]:
        (x,) = allocate("x", [problem.count], problem.dtype)
        python = Candidate(
            name,
            load=lambda: fill([x], values),
            run=lambda: co.all_reduce_(x, group=problem.comm),
            result=lambda: [x],
        )
        if problem.bytes > CPP_BYTES:
            return [python]

        def repeat(calls: int) -> None:
            problem.comm._core.repeat_all_reduce_(x, calls)

        cpp = replace(python, name=f"{name} (C++)", run=lambda: repeat(1), repeat=repeat)
        return [python, cpp]

    return [
        *in_place("coconet private", buffers.private),
        *in_place("coconet heap", buffers.heap),
    ]


def summed(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of all ranks' tiles in float64, and how far a rounded sum may be off."""
    inputs = torch.stack([tile(rank, problem.dtype) for rank in range(problem.world)]).double()
    rounding = problem.world * torch.finfo(problem.dtype).eps
    return inputs.sum(0), inputs.abs().sum(0) * rounding


def expected(problem: Problem) -> Expected:
    return Expected(*summed(problem))


CASE = Case(
    op="all_reduce",
    summary="in-place sum on every rank",
    unit="bytes",
    sizes=(4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20),
    candidates=candidates,
    expected=expected,
    moved_bytes=lambda problem: 2 * problem.bytes if problem.world > 1 else 0,
    bus_factor=lambda world: 2 * (world - 1) / world,
)
