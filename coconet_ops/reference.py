"""The unfused ops: torch.distributed and eager PyTorch, with the semantics of the fused ones.

They define what the fused ops compute, and serve as baseline. ``group`` is a process group or None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def all_reduce(
    x: torch.Tensor, *, op: str = "sum", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), op=op, group=group)


def all_reduce_(
    x: torch.Tensor, *, op: str = "sum", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    y = x.contiguous()
    dist.all_reduce(y, group=group)
    if op == "avg":
        y.div_(dist.get_world_size(group))
    return y if y is x else x.copy_(y)


def reduce_scatter(
    x: torch.Tensor,
    *,
    dim: int = 0,
    op: str = "sum",
    split: str = "tensor_split",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    y = all_reduce(x, op=op, group=group)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if split == "tensor_split":
        return y.tensor_split(world, dim)[rank].contiguous()
    chunks = y.chunk(world, dim)
    return (chunks[rank] if rank < len(chunks) else y.narrow(dim, 0, 0)).contiguous()


def all_gather(
    x: torch.Tensor,
    *,
    dim: int = 0,
    size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    shards: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(shards, x.detach().contiguous(), group=group)
    y = torch.cat(shards, dim)
    if size is not None and y.shape[dim] != size:
        raise ValueError(f"all_gather: size is {size} but the shards have {y.shape[dim]}")
    return y


@torch.no_grad()
def rs_adam_ag_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    optimizer: torch.optim.Optimizer,
    *,
    average_grads: bool = True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """All-reduces the gradients, then steps a torch.optim optimizer over the same parameters.

    A gradient that is None on some ranks counts as zero there; a parameter without any is skipped.
    """
    present = torch.tensor(
        [g is not None for g in grads],
        dtype=torch.int32,
        device=params[0].device if params else None,
    )
    dist.all_reduce(present, group=group)
    op = "avg" if average_grads else "sum"
    for p, g, ranks in zip(params, grads, present.tolist(), strict=True):
        g = torch.zeros_like(p) if g is None else g
        p.grad = all_reduce(g, op=op, group=group) if ranks else None
    optimizer.step()
