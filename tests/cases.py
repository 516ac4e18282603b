"""Cases that the tests share: shapes, layouts, inputs, the float64 oracle and the tolerances.

Inputs depend only on (rank, seed), so every rank knows the inputs of all ranks and computes the
expected result by itself. They are on torch's default device, which is the communicator's.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCE_DTYPES = (*DTYPES, torch.float64, torch.int32, torch.int64)
PLACEMENTS = ("private", "heap", "mixed")  # mixed: in the heap on even ranks only
LAYOUTS = ("contiguous", "transposed", "strided", "columns", "misaligned")

SHAPES = ((), (0,), (1,), (129,), (1134,), (1023, 7), (3, 5, 7), (4, 0, 3), (2, 3, 4, 5))
MANY_DIMENSIONS = (*(1,) * 36, 2, 3)
LARGER_THAN_STAGING = 3_000_001

# The result is an fp32 sum in rank order, rounded once to the dtype: half a unit in the last place,
# plus the fp32 error of a sum of a few numbers of size 1.
TOLERANCE = {
    torch.float32: {"rtol": 2**-23, "atol": 2e-6},
    torch.bfloat16: {"rtol": 1.01 * 2**-8, "atol": 2e-6},
    torch.float16: {"rtol": 1.01 * 2**-11, "atol": 2e-6},
    torch.float64: {"rtol": 2**-51, "atol": 4e-15},  # the oracle adds in another order
    torch.int32: {"rtol": 0, "atol": 0},
    torch.int64: {"rtol": 0, "atol": 0},
}
# gloo adds in the dtype itself and rounds after each addition.
UNFUSED_TOLERANCE = {
    torch.float32: {"rtol": 2**-21, "atol": 4e-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-5},
    torch.float16: {"rtol": 2**-9, "atol": 2**-8},
}
# 25 optimizer steps in fp32 against float64 (fp32 parameters, or the masters of bf16 and fp16).
OPTIMIZER_TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def integers(shape: Sequence[int], dtype: torch.dtype, rank: int, seed: int = 0) -> Tensor:
    """Whole numbers whose sums are exact in every dtype."""
    generator = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    x = torch.randint(-12, 13, tuple(shape), generator=generator, device="cpu")
    return x.to(torch.get_default_device(), dtype)


def normals(shape: Sequence[int], dtype: torch.dtype, rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    x = torch.randn(tuple(shape), generator=generator, device="cpu")
    return x.to(torch.get_default_device(), dtype)


def reduced(inputs: Sequence[Tensor], op: str = "sum") -> Tensor:
    """Oracle: the float64 sum or average over the ranks."""
    total = torch.stack([x.double() for x in inputs]).sum(0)
    return total / len(inputs) if op == "avg" else total


def arranged(buffer: Tensor, shape: Sequence[int], layout: str) -> Tensor:
    """A view of the flat buffer (of `room(shape, layout)` elements) with this shape and layout."""
    shape = tuple(shape)
    if layout == "transposed":
        return buffer.view(shape[::-1]).permute(*range(len(shape))[::-1])
    if layout == "strided":
        return buffer.view(*shape, 2)[..., 1]
    if layout == "columns":
        return buffer.view(*shape[:-1], shape[-1] + 3)[..., 2:-1]
    if layout == "misaligned":
        return buffer[1:].view(shape)
    return buffer.view(shape)


def room(shape: Sequence[int], layout: str) -> int:
    """Elements of the buffer under a view of this shape and layout."""
    numel = torch.Size(shape).numel()
    if layout == "strided":
        return 2 * numel
    if layout == "columns":
        return torch.Size((*shape[:-1], shape[-1] + 3)).numel()
    return numel + (layout == "misaligned")


def layouts(shape: Sequence[int]) -> Iterator[str]:
    """The layouts that make sense for this shape."""
    for layout in LAYOUTS:
        if len(shape) == 0 and layout == "columns" or len(shape) < 2 and layout == "transposed":
            continue
        yield layout


def placed(comm, values: Tensor, placement: str, layout: str = "contiguous", most: int = 0):
    """A copy of values in private memory or in the heap, and the buffer under it. Collective.
    most: elements of the largest buffer among the ranks, where they differ."""
    elements = room(values.shape, layout)
    buffer = torch.empty(elements, dtype=values.dtype, device=comm.device)
    if placement != "private":
        heap = comm.empty(max(most, elements), dtype=values.dtype)[:elements]
        if placement == "heap" or comm.rank % 2 == 0:
            buffer = heap
    buffer.fill_(77)
    x = arranged(buffer, values.shape, layout)
    x.copy_(values)
    return x, buffer


def poison(comm, nbytes: int) -> None:
    """Leaves NaNs (0xFF bytes) in the heap block that the next tensor of this size takes."""
    block = comm.empty(max(1, nbytes), dtype=torch.uint8)
    block.fill_(0xFF)


def bits(x: Tensor) -> bytes:
    """The elements in order, as bytes."""
    flat = torch.empty(x.numel(), dtype=x.dtype, device="cpu")
    flat.view(x.shape).copy_(x.detach())
    return flat.view(torch.uint8).numpy().tobytes()


def digest(x: Tensor) -> str:
    """Short name of shape, dtype and bits."""
    return hashlib.sha1(repr((tuple(x.shape), x.dtype)).encode() + bits(x)).hexdigest()[:16]


def assert_close(actual: Tensor, expected: Tensor, tolerance: dict, what: object) -> None:
    """Compares with a float64 oracle."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    torch.testing.assert_close(
        actual.cpu().double(),
        expected.cpu().double(),
        **tolerance,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def assert_exact(actual: Tensor, expected: Tensor, what: object) -> None:
    """Equal shapes and values; expected may be the float64 oracle."""
    assert_close(actual, expected, {"rtol": 0, "atol": 0}, what)


def product(*lists: Sequence) -> Iterator[tuple]:
    return itertools.product(*lists)


def gradient(shape: Sequence[int], dtype: torch.dtype, rank: int, seed: int) -> Tensor:
    """Multiples of 1/64: sums over ranks are exact, so none is a near-zero that rounding makes.
    (Adam's first step is lr * sign(g), however small g is.)"""
    return (normals(shape, torch.float32, rank, seed) * 64).round().div(64).to(dtype)


class Adam64:
    """Oracle: torch.optim.Adam and AdamW in float64, and the same without bias correction."""

    def __init__(self, params: Sequence[Tensor], adam_w_mode=True, bias_correction=True) -> None:
        self.params = [p.detach().double().clone().requires_grad_() for p in params]
        self.adam_w_mode = adam_w_mode
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        self.optimizer = kind(self.params) if bias_correction else None
        self.exp_avg = [torch.zeros_like(p) for p in self.params]
        self.exp_avg_sq = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self, grads, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0) -> None:
        """grads: float64 tensors; None skips a parameter."""
        if self.optimizer is not None:
            for p, grad in zip(self.params, grads, strict=True):
                p.grad = grad
            hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            self.optimizer.param_groups[0].update(hyper)
            self.optimizer.step()
            return
        for p, grad, m, v in zip(self.params, grads, self.exp_avg, self.exp_avg_sq, strict=True):
            if grad is None:
                continue
            if self.adam_w_mode:
                p -= lr * weight_decay * p
            else:
                grad = grad + weight_decay * p
            m += (1 - betas[0]) * (grad - m)
            v += (1 - betas[1]) * (grad**2 - v)
            p -= lr * m / (v.sqrt() + eps)


def flat_list(tensors: Sequence[Tensor], total: int) -> Tensor:
    """The tensors end to end as the optimizer's slices see them: each starts at a multiple of 64
    elements. Padding is NaN."""
    flat = torch.full((total,), float("nan"), dtype=torch.float64)
    start = 0
    for x in tensors:
        flat[start : start + x.numel()] = x.detach().flatten()
        start += -(-x.numel() // 64) * 64
    assert start <= total
    return flat
