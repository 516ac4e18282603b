"""gloo through torch.distributed: what PyTorch runs on CPUs by default."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from ..check import fill, tile
from ..model import Buffers, Candidate, Problem
from . import Peer
from ._adam import whole_step

BUCKET_BYTES = 25 << 20  # DistributedDataParallel's default
UNPINNED_BYTES = 1 << 20  # with larger tensors gloo is at its best on one core per rank
# torch 2.13 renamed them
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def missing() -> str | None:
    return None if dist.is_gloo_available() else "this torch was built without gloo"


def all_reduce(problem: Problem, buffers: Buffers) -> list[Candidate]:
    (x,) = buffers.private("x", [problem.count], problem.dtype)
    values = tile(problem.rank, problem.dtype)
    return _unpinned_too(
        problem,
        Candidate("gloo", lambda: fill([x], values), lambda: dist.all_reduce(x), lambda: [x]),
    )


def reduce_scatter(problem: Problem, buffers: Buffers) -> list[Candidate]:
    (x,) = buffers.private("x", [problem.count], problem.dtype)
    (out,) = buffers.private("shard", [problem.count // problem.world], problem.dtype)
    values = tile(problem.rank, problem.dtype)

    def load() -> None:
        fill([x], values)

    return _unpinned_too(
        problem,
        Candidate("gloo all_reduce", load, lambda: dist.all_reduce(x), lambda: [x[problem.shard]]),
        Candidate(
            "gloo reduce_scatter", load, lambda: reduce_scatter_single(out, x), lambda: [out]
        ),
    )


def all_gather(problem: Problem, buffers: Buffers) -> list[Candidate]:
    (x,) = buffers.private("shard", [problem.count // problem.world], problem.dtype)
    (out,) = buffers.private("x", [problem.count], problem.dtype)
    pieces = list(out.chunk(problem.world))
    values = tile(0, problem.dtype)

    def load() -> None:
        fill([x], values, problem.shard.start)

    return _unpinned_too(
        problem,
        Candidate("gloo all_gather", load, lambda: dist.all_gather(pieces, x), lambda: [out]),
        Candidate("gloo all_gather flat", load, lambda: all_gather_single(out, x), lambda: [out]),
    )


def rs_adam_ag(problem: Problem, buffers: Buffers) -> list[Candidate]:
    """all_reduce of one flat gradient, then torch.optim.Adam(fused=True)."""

    def in_buckets(flat: Tensor) -> None:
        buckets = flat.split(BUCKET_BYTES // problem.dtype.itemsize)
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    whole = whole_step(problem, buffers, "gloo + Adam(fused)", dist.all_reduce)
    if problem.bytes <= BUCKET_BYTES:
        return _unpinned_too(problem, whole)
    return [whole, whole_step(problem, buffers, "gloo 25 MB + Adam(fused)", in_buckets)]


def _unpinned_too(problem: Problem, *candidates: Candidate) -> list[Candidate]:
    """Small messages wait for gloo's threads, which wake up sooner where they may change cores."""
    if problem.bytes > UNPINNED_BYTES:
        return list(candidates)
    free = [replace(c, name=f"{c.name} unpinned", pinned=False) for c in candidates]
    return [*candidates, *free]


PEER = Peer(
    name="gloo",
    missing=missing,
    factories={
        "all_reduce": all_reduce,
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        "rs_adam_ag": rs_adam_ag,
    },
)
