"""Performs a planned call and checks its result.

Every rank knows the data of all ranks, whole numbers whose sums are exact, and computes the
expected result by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import coconet_ops as co

from .plan import Call

# Adam against float64, by the dtype of the parameters.
ADAM_TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
}


class WrongResult(AssertionError):
    pass


def digest(x: Tensor) -> str:
    """A short name of the bits."""
    flat = torch.empty(x.numel(), dtype=x.dtype)
    flat.view(x.shape).copy_(x.detach())
    return hashlib.sha1(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def perform(call: Call, comm: co.Communicator) -> tuple[Tensor | None, list[Tensor]]:
    """Returns the result, and the tensors that must have the same bits on all ranks."""
    return _PERFORM[call.op](call, comm)


# --- data ----------------------------------------------------------------------------------------


def numbers(call: Call, rank: int, shape: tuple[int, ...] | None = None, salt: int = 0) -> Tensor:
    """The data of a rank of the group."""
    generator = torch.Generator().manual_seed(call.seed * 100 + salt * 10 + rank)
    dtype = getattr(torch, call.dtype)
    low, high = (0, 2) if dtype is torch.bool else (0 if dtype is torch.uint8 else -12, 13)
    shape = call.shape if shape is None else shape
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def placed(call: Call, comm: co.Communicator, values: Tensor, most: int | None = None) -> Tensor:
    """A copy of the values where the plan wants it. most: elements of the largest rank's."""
    room = (values.numel() if most is None else most) * (2 if call.strided else 1)
    buffer = torch.empty(room, dtype=values.dtype)
    if any(call.heap):
        block = comm.empty(room, dtype=values.dtype)
        buffer = block if call.heap[comm.rank] else buffer
    used = buffer[: values.numel() * (2 if call.strided else 1)]
    if call.strided:
        used = used.view(*values.shape, 2)[..., 1]
    return used.view(values.shape).copy_(values)


def reduced(call: Call, inputs: list[Tensor]) -> Tensor:
    """The sum or average as the library rounds it: 16-bit floats in fp32, then once."""
    wide = torch.float32 if inputs[0].dtype.itemsize == 2 else inputs[0].dtype
    total = torch.stack([x.to(wide) for x in inputs]).sum(0, dtype=wide)
    if call.options["op"] == "avg":
        total = total * (torch.tensor(1.0, dtype=wide) / len(inputs))
    return total.to(inputs[0].dtype)


def check(call: Call, what: str, actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise WrongResult(
            f"{what}: {list(actual.shape)} {actual.dtype}, expected {list(expected.shape)} "
            f"{expected.dtype}: {call}"
        )
    if not torch.equal(actual, expected):
        wrong = (actual != expected).flatten().nonzero().flatten()
        at = int(wrong[0])
        raise WrongResult(
            f"{what}: {len(wrong)} of {actual.numel()} elements are wrong, the first at {at}: "
            f"{actual.flatten()[at]}, expected {expected.flatten()[at]}: {call}"
        )


@contextlib.contextmanager
def inputs_intact(call: Call, tensors: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Afterwards the tensors have these values, whether the call succeeded or failed."""
    try:
        yield
    finally:
        for x, expected in zip(tensors, values, strict=True):
            check(call, "input", x, expected)


# --- ops -----------------------------------------------------------------------------------------


def _all_reduce(call, comm):
    inputs = [numbers(call, r) for r in range(comm.world_size)]
    x = placed(call, comm, inputs[comm.rank])
    with inputs_intact(call, [x], [inputs[comm.rank]]):
        y = co.all_reduce(x, op=call.options["op"], group=comm)
    check(call, "result", y, reduced(call, inputs))
    return y, [y]


def _all_reduce_in_place(call, comm):
    inputs = [numbers(call, r) for r in range(comm.world_size)]
    x = placed(call, comm, inputs[comm.rank])
    y = co.all_reduce_(x, op=call.options["op"], group=comm)
    check(call, "result", y, reduced(call, inputs))
    return x, [x]


def _reduce_scatter(call, comm):
    inputs = [numbers(call, r) for r in range(comm.world_size)]
    x = placed(call, comm, inputs[comm.rank])
    dim, split = call.options["dim"], call.options["split"]
    with inputs_intact(call, [x], [inputs[comm.rank]]):
        y = co.reduce_scatter(x, dim=dim, op=call.options["op"], split=split, group=comm)
    total = reduced(call, inputs)
    if split == "tensor_split":
        parts = total.tensor_split(comm.world_size, dim)
    else:
        parts = total.chunk(comm.world_size, dim)
        parts += (total.narrow(dim, 0, 0),) * (comm.world_size - len(parts))
    check(call, "result", y, parts[comm.rank])
    return y, []


def _all_gather(call, comm):
    dim = call.options["dim"]
    rng = random.Random(call.seed)
    shards = []
    for r in range(comm.world_size):
        shape = list(call.shape)
        shape[dim] = rng.randint(0, shape[dim])
        shards.append(numbers(call, r, tuple(shape)))
    x = placed(call, comm, shards[comm.rank], max(s.numel() for s in shards))
    with inputs_intact(call, [x], [shards[comm.rank]]):
        y = co.all_gather(x, dim=dim, group=comm)
    check(call, "result", y, torch.cat(shards, dim))
    return y, [y]


def _empty(call, comm):
    x = comm.empty(*call.shape, dtype=getattr(torch, call.dtype))
    return x.copy_(numbers(call, comm.rank)), []


def _barrier(call, comm):
    comm.barrier()
    return None, []


class _Adam64:
    """torch.optim.AdamW on float64 copies of the parameters."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = [nn.Parameter(p.detach().double()) for p in params]
        self.optimizer = torch.optim.AdamW(self.params, lr=0.125, weight_decay=0.0)

    def step(self, gradients: list[list[Tensor]]) -> None:
        """gradients: by rank, then by parameter; averaged."""
        for i, p in enumerate(self.params):
            p.grad = torch.stack([g[i].double() for g in gradients]).mean(0)
        self.optimizer.step()

    def check(self, call: Call, params: list[Tensor]) -> None:
        for i, (p, expected) in enumerate(zip(params, self.params, strict=True)):
            tolerance = ADAM_TOLERANCE[p.dtype]
            if not torch.allclose(p.double(), expected.detach(), **tolerance):
                off = (p.double() - expected).abs().max()
                raise WrongResult(f"params[{i}] is off by {off}: {call}")


def _gradients(call: Call, params: list[Tensor], world: int, step: int) -> list[list[Tensor]]:
    return [
        [numbers(call, r, tuple(p.shape), 2 + 3 * step + i) for i, p in enumerate(params)]
        for r in range(world)
    ]


def _adam(call, comm):
    values = [numbers(call, 0), numbers(call, 0, (7,), 1)]
    params = [placed(call, comm, v) for v in values]
    state = co.AdamState(params, group=comm)
    oracle = _Adam64(values)
    for step in range(call.options["steps"]):
        gradients = _gradients(call, params, comm.world_size, step)
        own = [placed(call, comm, g) for g in gradients[comm.rank]]
        with inputs_intact(call, own, gradients[comm.rank]):
            co.rs_adam_ag_(params, own, state, lr=0.125)
        oracle.step(gradients)
        oracle.check(call, params)
    return params[0], params


def _optimizer(call, comm):
    params = [nn.Parameter(numbers(call, 0)), nn.Parameter(numbers(call, 0, (7,), 1))]
    oracle = _Adam64(params)
    optimizer = co.optim.DistributedFusedAdam(
        params, lr=0.125, process_group=comm, rehome=call.heap[0]
    )
    for step in range(call.options["steps"]):
        optimizer.zero_grad()
        gradients = _gradients(call, params, comm.world_size, step)
        for p, g in zip(params, gradients[comm.rank], strict=True):
            (p * g).sum().backward()
        optimizer.step()
        oracle.step(gradients)
        oracle.check(call, params)
    return params[0].detach(), [p.detach() for p in params]


_PERFORM = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_in_place,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "adam": _adam,
    "optimizer": _optimizer,
    "empty": _empty,
    "barrier": _barrier,
}
