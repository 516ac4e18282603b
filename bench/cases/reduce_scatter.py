"""reduce_scatter, sum: rank r gets slice r of Σ_r x_r. Bytes are those of the whole input.

Floor: a rank loads its slice (1/W of n bytes) from W ranks and stores it once: n (W + 1) / W bytes.
"""

from __future__ import annotations

from torch import Tensor

import coconet_ops as co

from ..check import fill, tile
from ..model import Buffers, Candidate, Case, Expected, Problem
from .all_reduce import summed


def candidates(problem: Problem, buffers: Buffers) -> list[Candidate]:
    values = tile(problem.rank, problem.dtype)

    def out_of_place(name: str, allocate) -> Candidate:
        (x,) = allocate("x", [problem.count], problem.dtype)
        output: list[Tensor] = []

        def run() -> None:
            output.clear()  # first, so that the allocator can hand the same memory out again
            output.append(co.reduce_scatter(x, group=problem.comm))

        return Candidate(name, lambda: fill([x], values), run, lambda: output)

    return [
        out_of_place("coconet private", buffers.private),
        out_of_place("coconet heap", buffers.heap),
    ]


def expected(problem: Problem) -> Expected:
    return Expected(*summed(problem), start=problem.shard.start)


CASE = Case(
    op="reduce_scatter",
    summary="sum, each rank keeps its slice",
    unit="bytes",
    sizes=(1 << 20, 16 << 20),
    candidates=candidates,
    expected=expected,
    moved_bytes=lambda problem: problem.bytes * (problem.world + 1) / problem.world,
    bus_factor=lambda world: (world - 1) / world,
)
