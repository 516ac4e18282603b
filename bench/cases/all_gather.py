"""all_gather: every rank gets the shards of all. Bytes are those of the whole output.

Floor: a rank loads every shard and stores it in its output: 2 n bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

import coconet_ops as co

from ..check import fill, tile
from ..model import Buffers, Candidate, Case, Expected, Problem


def candidates(problem: Problem, buffers: Buffers) -> list[Candidate]:
    values = tile(0, problem.dtype)  # one sequence, of which each rank holds its shard

    def out_of_place(name: str, allocate) -> Candidate:
        (x,) = allocate("shard", [problem.count // problem.world], problem.dtype)
        output: list[Tensor] = []

        def run() -> None:
            output.clear()  # first, so that the allocator can hand the same memory out again
            output.append(co.all_gather(x, group=problem.comm))

        return Candidate(name, lambda: fill([x], values, problem.shard.start), run, lambda: output)

    return [
        out_of_place("coconet private", buffers.private),
        out_of_place("coconet heap", buffers.heap),
    ]


def expected(problem: Problem) -> Expected:
    values = tile(0, problem.dtype).double()
    return Expected(values, torch.zeros_like(values))


CASE = Case(
    op="all_gather",
    summary="every rank gets all shards",
    unit="bytes",
    sizes=(1 << 20, 16 << 20),
    candidates=candidates,
    expected=expected,
    moved_bytes=lambda problem: 2 * problem.bytes,
    bus_factor=lambda world: (world - 1) / world,
)
