"""Collectives in shared memory.

Tensors from :meth:`Communicator.empty` are used where they are, without a copy; results are then in
the heap too. Any other tensor goes through small staging areas. Either way elements are added in
rank order, 16-bit floats in fp32 and rounded once, other dtypes in their own: results are bitwise
identical on all ranks and from run to run. No gradients yet.
"""

from __future__ import annotations

import torch

from . import checks
from .communicator import Communicator, Group, communicator

_ops = torch.ops.coconet


def all_reduce(x: torch.Tensor, *, op: str = "sum", group: Group = None) -> torch.Tensor:
    """The sum or average of ``x`` over all ranks, on every rank.

    Unfused: ``y = x.clone(); torch.distributed.all_reduce(y)``
    (:func:`coconet_ops.reference.all_reduce`).

    Args:
        x: any shape, equal on all ranks; float32, bfloat16, float16, float64, int32 or int64.
        op: ``"sum"`` or ``"avg"``, the latter for floats. Integers wrap around.
        group: process group, communicator or None (the default group).

    Returns:
        A contiguous tensor of the shape and dtype of ``x``; in the heap when ``x`` is on all ranks.

    Raises:
        TypeError, ValueError: unsupported dtype, layout or device; unknown op.
        MismatchError: the ranks disagree on op, dtype or shape.
        PeerLostError, CommunicatorTimeout: a peer died, or didn't call in time.
    """
    comm = communicator(group)
    with checks.arguments(comm, "all_reduce"):
        _check_reduce(comm, "all_reduce", x, op)
    return _ops.all_reduce(x, op, comm._id)


def all_reduce_(x: torch.Tensor, *, op: str = "sum", group: Group = None) -> torch.Tensor:
    """In-place :func:`all_reduce`: ``x`` receives the result and is returned."""
    comm = communicator(group)
    with checks.arguments(comm, "all_reduce_"):
        _check_reduce(comm, "all_reduce_", x, op)
        checks.check_writable("all_reduce_", "x", x)
    return _ops.all_reduce_(x, op, comm._id)


def reduce_scatter(
    x: torch.Tensor,
    *,
    dim: int = 0,
    op: str = "sum",
    split: str = "tensor_split",
    group: Group = None,
) -> torch.Tensor:
    """This rank's slice, along ``dim``, of the sum or average of ``x`` over all ranks.

    Unfused: ``torch.tensor_split(all_reduce(x), world_size, dim)[rank]``
    (:func:`coconet_ops.reference.reduce_scatter`).

    Args:
        x: at least one dimension, shape equal on all ranks; dtypes as :func:`all_reduce`.
        dim: the dimension that is cut; its size need not be divisible by the world size.
        op: ``"sum"`` or ``"avg"``.
        split: how uneven sizes are cut: ``"tensor_split"`` (the first ranks get one row more) or
            ``"chunk"`` (as ``torch.chunk`` and DTensor: the last ranks get fewer rows, or none).
        group: process group, communicator or None (the default group).

    Returns:
        A contiguous tensor; in the heap when ``x`` is on all ranks.

    Raises: as :func:`all_reduce`.
    """
    comm = communicator(group)
    with checks.arguments(comm, "reduce_scatter"):
        _check_reduce(comm, "reduce_scatter", x, op)
        checks.check_choice("reduce_scatter", "split", split, checks.SPLITS)
        dim = checks.check_dim("reduce_scatter", dim, x)
    return _ops.reduce_scatter(x, dim, op, split, comm._id)


def all_gather(
    x: torch.Tensor, *, dim: int = 0, size: int | None = None, group: Group = None
) -> torch.Tensor:
    """The shards of all ranks, concatenated along ``dim`` in rank order.

    Unfused: ``torch.cat`` of what ``torch.distributed.all_gather`` gives
    (:func:`coconet_ops.reference.all_gather`).

    Args:
        x: this rank's shard, of any dtype, with at least one dimension. Sizes along ``dim`` may
            differ between ranks; all other sizes are equal.
        dim: the dimension to concatenate along.
        size: the total size along ``dim``; checked when given.
        group: process group, communicator or None (the default group).

    Returns:
        A contiguous tensor; in the heap when every shard is.

    Raises: as :func:`all_reduce`; MismatchError also when ``size`` isn't the shards' total.
    """
    comm = communicator(group)
    with checks.arguments(comm, "all_gather"):
        checks.check_tensor(comm, "all_gather", "x", x, dtypes=None)
        dim = checks.check_dim("all_gather", dim, x)
        if size is not None and (not isinstance(size, int) or size < 0):
            raise ValueError(f"all_gather: size is {size!r}; it must be an integer >= 0")
    return _ops.all_gather(x, dim, -1 if size is None else size, comm._id)


def _check_reduce(comm: Communicator, name: str, x: torch.Tensor, op: str) -> None:
    checks.check_tensor(comm, name, "x", x, checks.REDUCE_DTYPES)
    checks.check_choice(name, "op", op, checks.REDUCE_OPS)
    if op == "avg" and not x.is_floating_point():
        raise TypeError(
            f"{name}: op is 'avg' and x has dtype {x.dtype}; integers can only be summed"
        )
