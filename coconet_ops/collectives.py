"""Collectives in shared memory.

Tensors from :meth:`Communicator.empty` are used where they are, without a copy; results are then in
the heap too. Any other tensor goes through small staging areas. Either way elements are added in
rank order, 16-bit floats in fp32 and rounded once, other dtypes in their own: results are bitwise
identical on all ranks and from run to run.

Gradients follow Megatron's convention: the gradient of a replicated output (one that is equal on
all ranks) arrives complete and equal on every rank, as it does when every rank computes the same
loss from it. torch's own functional collectives sum it over the ranks instead. A backward pass
calls collectives too, so all ranks run it, through the same ops. There are no forward-mode
gradients.

Under ``torch.compile`` the group is a constant of the compiled code, and bad arguments are found
when a rank compiles, without telling its peers.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from . import _C, checks
from .communicator import Communicator, Group, communicator_for, number, world_size

_ops = torch.ops.coconet


def all_reduce(x: torch.Tensor, *, op: str = "sum", group: Group = None) -> torch.Tensor:
    """The sum or average of ``x`` over all ranks, on every rank.

    Unfused: ``y = x.clone(); torch.distributed.all_reduce(y)``
    (:func:`coconet_ops.reference.all_reduce`).

    Gradient (Megatron's convention, its *g*): that of the result as it is; ``"avg"`` divides it by
    the world size. torch's functional ``all_reduce`` sums it over the ranks instead.

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
    if is_dynamo_compiling():
        return _ops.all_reduce.default(x, op, number(group, x.device.type))
    comm = communicator_for(x, group)
    with checks.arguments(comm, "all_reduce"):
        check_reduce(comm, "all_reduce", x, op)
    return _C.all_reduce(x, op, comm._id)


def all_reduce_(x: torch.Tensor, *, op: str = "sum", group: Group = None) -> torch.Tensor:
    """In-place :func:`all_reduce`: ``x`` receives the result and is returned.

    Raises: as :func:`all_reduce`; ValueError when elements of ``x`` share memory, RuntimeError when
        ``x`` is a leaf that requires grad (or a view of one), as any in-place change.
    """
    if is_dynamo_compiling():
        _ops.all_reduce_.default(x, op, number(group, x.device.type))
        return x
    comm = communicator_for(x, group)
    with checks.arguments(comm, "all_reduce_"):
        check_reduce(comm, "all_reduce_", x, op)
        checks.check_writable("all_reduce_", "x", x)
        checks.check_no_leaf("all_reduce_", "x", x)
    _C.all_reduce_(x, op, comm._id)
    return x


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

    Gradient (Megatron's convention): an :func:`all_gather` of the slices' gradients; ``"avg"``
    divides it by the world size. torch's functional ``reduce_scatter_tensor`` does the same.

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
    if is_dynamo_compiling():
        return _ops.reduce_scatter.default(x, dim, op, split, number(group, x.device.type))
    comm = communicator_for(x, group)
    with checks.arguments(comm, "reduce_scatter"):
        dim = check_reduce_scatter(comm, x, dim, op, split)
    return _C.reduce_scatter(x, dim, op, split, comm._id)


def all_gather(
    x: torch.Tensor,
    *,
    dim: int = 0,
    size: int | None = None,
    grad: str = "slice",
    group: Group = None,
) -> torch.Tensor:
    """The shards of all ranks, concatenated along ``dim`` in rank order.

    Unfused: ``torch.cat`` of what ``torch.distributed.all_gather`` gives
    (:func:`coconet_ops.reference.all_gather`).

    Gradient (Megatron's convention): this rank's slice of the result's gradient, which is complete
    on every rank. With ``grad="reduce_scatter"``, for results whose users on each rank hold a part
    of the gradient (Megatron's sequence parallelism), the slice of its sum over the ranks; that is
    what torch's functional ``all_gather_tensor`` does.

    Args:
        x: this rank's shard, of any dtype, with at least one dimension. Sizes along ``dim`` may
            differ between ranks; all other sizes are equal.
        dim: the dimension to concatenate along.
        size: the total size along ``dim``; checked when given. Compiled code takes shards for
            equal without it.
        grad: ``"slice"`` or ``"reduce_scatter"``; the latter sums gradients, which must be of a
            dtype that :func:`all_reduce` takes.
        group: process group, communicator or None (the default group).

    Returns:
        A contiguous tensor; in the heap when every shard is.

    Raises: as :func:`all_reduce`; MismatchError also when ``size`` isn't the shards' total.
    """
    if is_dynamo_compiling():
        if size is None:
            size = x.shape[dim] * world_size(group, x.device.type)
        return _ops.all_gather.default(x, dim, size, grad, number(group, x.device.type))
    comm = communicator_for(x, group)
    with checks.arguments(comm, "all_gather"):
        dim = check_all_gather(comm, x, dim, grad)
        if size is None:
            size = -1
        elif not isinstance(size, int) or not 0 <= size < 2**63:
            raise ValueError(f"all_gather: size is {size!r}; it must be an integer >= 0 and < 2^63")
    return _C.all_gather(x, dim, size, grad, comm._id)


def copy_to_group(x: torch.Tensor, *, group: Group = None) -> torch.Tensor:
    """``x`` itself, as a view; its gradient is summed over all ranks (Megatron's *f*).

    For a replicated ``x`` whose users on each rank, such as the columns of a split weight, give a
    part of the gradient. Forward it communicates nothing.

    Gradient: :func:`all_reduce` of the result's; the sum is complete and equal on every rank.

    Args:
        x: any shape, equal on all ranks; dtypes as :func:`all_reduce`.
        group: process group, communicator or None (the default group).

    Raises: as :func:`all_reduce`, in the backward pass when ranks disagree.
    """
    if is_dynamo_compiling():
        return _ops.copy_to_group.default(x, number(group, x.device.type))
    comm = communicator_for(x, group)
    checks.check_tensor(comm, "copy_to_group", "x", x, checks.REDUCE_DTYPES)
    return _C.copy_to_group(x, comm._id)


def check_reduce(comm: Communicator, name: str, x: torch.Tensor, op: str) -> None:
    checks.check_tensor(comm, name, "x", x, checks.REDUCE_DTYPES)
    checks.check_choice(name, "op", op, checks.REDUCE_OPS)
    if op == "avg" and not x.is_floating_point():
        raise TypeError(
            f"{name}: op is 'avg' and x has dtype {x.dtype}; integers can only be summed"
        )


def check_reduce_scatter(
    comm: Communicator, x: torch.Tensor, dim: object, op: str, split: str
) -> int:
    """The dimension, counted from the front."""
    check_reduce(comm, "reduce_scatter", x, op)
    checks.check_choice("reduce_scatter", "split", split, checks.SPLITS)
    return checks.check_dim("reduce_scatter", dim, x)


def check_all_gather(comm: Communicator, x: torch.Tensor, dim: object, grad: str) -> int:
    """The dimension, counted from the front."""
    checks.check_choice("all_gather", "grad", grad, checks.GATHER_GRADS)
    summed = grad == "reduce_scatter"
    checks.check_tensor(comm, "all_gather", "x", x, checks.REDUCE_DTYPES if summed else None)
    return checks.check_dim("all_gather", dim, x)
