"""Inputs and the float64 check.

Every rank's input repeats with a prime period, so the float64 answer of any elementwise or reducing
op repeats too: it is computed on one period and compared with every element, at any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from .model import BenchError, Candidate, Expected, Problem

PERIOD = 8191  # prime, so that no slice or chunk boundary lines up with it
BLOCK = 64 * PERIOD


@lru_cache(maxsize=64)
def tile(seed: int, dtype: torch.dtype) -> Tensor:
    """One period of the values with this seed, exact in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(PERIOD, generator=generator).to(dtype)


def fill(pieces: Sequence[Tensor], values: Tensor, start: int = 0) -> None:
    """Write consecutive pieces as elements start, start + 1, ... of the repeated tile."""
    for piece, period in _blocks(pieces, values, start):
        piece.copy_(period)


def first_error(pieces: Sequence[Tensor], expected: Expected) -> str | None:
    """Describe the first element outside its tolerance, or None."""
    wanted = torch.stack((expected.tile, expected.tolerance))
    index = 0
    for piece, (want, tolerance) in _blocks(pieces, wanted, expected.start):
        bad = ~((piece.double() - want).abs() <= tolerance)  # true for NaN as well
        if bad.any():
            at = int(bad.nonzero()[0])
            return f"element {index + at} is {piece[at]:.9g}, float64 says {want[at]:.9g}"
        index += piece.numel()
    return None


def check(problem: Problem, candidate: Candidate, expected: Expected, calls: int) -> None:
    """Run the candidate and compare with float64; a wrong answer on any rank raises on all."""
    candidate.reset()
    for _ in range(calls):
        candidate.load()
        candidate.run()
    lenient = replace(expected, tolerance=expected.tolerance * candidate.leeway)
    error = first_error(candidate.result(), lenient)
    errors: list[str | None] = [None] * problem.world
    dist.all_gather_object(errors, error)
    for rank, message in enumerate(errors):
        if message:
            raise BenchError(
                f"{problem.op}: wrong answer from '{candidate.name}' ({problem.dtype}, "
                f"{problem.count} elements, layout {problem.layout}) on rank {rank}: {message}"
            )


def _blocks(
    pieces: Sequence[Tensor], values: Tensor, start: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair up to BLOCK consecutive elements with the values of the tile that belong to them."""
    repeated = values.repeat(*[1] * (values.dim() - 1), BLOCK // PERIOD + 1)
    for piece in pieces:
        for part in piece.detach().view(-1).split(BLOCK):
            phase = start % PERIOD
            yield part, repeated[..., phase : phase + part.numel()]
            start += part.numel()
