"""Fake kernels: the shapes of the ops' results, for ``torch.compile`` and ``torch.export``."""

from __future__ import annotations

import torch

from . import checks, collectives
from .communicator import Communicator, by_number

Size = int | torch.SymInt


def _resized(x: torch.Tensor, dim: int, size: Size) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


@torch.library.register_fake("coconet::all_reduce")
def _all_reduce(x: torch.Tensor, op: str, comm: int) -> torch.Tensor:
    collectives.check_reduce(by_number(comm), "all_reduce", x, op)
    return x.new_empty(x.shape)


@torch.library.register_fake("coconet::all_reduce_")
def _all_reduce_(x: torch.Tensor, op: str, comm: int) -> None:
    collectives.check_reduce(by_number(comm), "all_reduce_", x, op)
    checks.check_writable("all_reduce_", "x", x)


@torch.library.register_fake("coconet::reduce_scatter")
def _reduce_scatter(x: torch.Tensor, dim: int, op: str, split: str, comm: int) -> torch.Tensor:
    ranks = by_number(comm)
    dim = collectives.check_reduce_scatter(ranks, x, dim, op, split)
    return _resized(x, dim, _rows(x.shape[dim], split, ranks))


def _rows(size: Size, split: str, comm: Communicator) -> Size:
    """This rank's rows of a dimension that is split."""
    world, rank = comm.world_size, comm.rank
    if split == "tensor_split":
        return (size + world - 1 - rank) // world
    share = (size + world - 1) // world
    begin = torch.sym_min(rank * share, size)
    return torch.sym_min(begin + share, size) - begin


@torch.library.register_fake("coconet::all_gather")
def _all_gather(x: torch.Tensor, dim: int, size: Size, grad: str, comm: int) -> torch.Tensor:
    dim = collectives.check_all_gather(by_number(comm), x, dim, grad)
    if isinstance(size, int) and size < 0:
        raise ValueError("all_gather: traced code needs size=, the total along dim")
    return _resized(x, dim, size)


@torch.library.register_fake("coconet::all_gather_begins")
def _all_gather_begins(
    x: torch.Tensor, dim: int, size: Size, comm: int
) -> tuple[torch.Tensor, torch.Tensor]:
    begins = torch.empty(by_number(comm).world_size + 1, dtype=torch.int64)
    return _resized(x, dim, size), begins


@torch.library.register_fake("coconet::own_rows")
@torch.library.register_fake("coconet::reduce_scatter_rows")
def _rows_of(
    x: torch.Tensor, begins: torch.Tensor, dim: int, rows: Size, comm: int
) -> torch.Tensor:
    return _resized(x, dim, rows)
