"""Checks of arguments. A message names the op, the tensor, the value and the rule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .communicator import Communicator

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCE_DTYPES = (*COMPUTE_DTYPES, torch.float64, torch.int32, torch.int64)
REDUCE_OPS = ("sum", "avg")
SPLITS = ("tensor_split", "chunk")
GATHER_GRADS = ("slice", "reduce_scatter")


class arguments:
    """Around the checks of a collective call: bad arguments on one rank are raised there, and
    reach its peers as :class:`MismatchError`."""

    __slots__ = ("comm", "op")

    def __init__(self, comm: Communicator, op: str) -> None:
        self.comm = comm
        self.op = op

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not self.comm.closed:
            self.comm._core.reject(self.op, str(error))


def check_tensor(
    comm: Communicator,
    op: str,
    name: str,
    x: object,
    dtypes: tuple[torch.dtype, ...] | None = COMPUTE_DTYPES,
) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} is a {type(x).__name__}; it must be a tensor")
    if x.layout is not torch.strided:
        raise TypeError(f"{op}: {name} has layout {x.layout}; only dense tensors are supported")
    if x.is_nested or x.is_quantized:
        what = "nested" if x.is_nested else "quantized"
        raise TypeError(f"{op}: {name} is a {what} tensor; only plain dense tensors are supported")
    if x.device != comm.device:
        raise ValueError(
            f"{op}: {name} is on device {x.device}; the {comm.backend} backend takes "
            f"{comm.device} tensors"
        )
    if dtypes is not None and x.dtype not in dtypes:
        raise TypeError(
            f"{op}: {name} has dtype {x.dtype}; supported are {', '.join(map(str, dtypes))}"
        )


def check_writable(op: str, name: str, x: torch.Tensor) -> None:
    """For tensors that are written in place."""
    if x.is_contiguous():
        return
    if any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(
            f"{op}: {name} has shape {list(x.shape)} and strides {list(x.stride())}, so several "
            "elements share memory; it can't be written in place (use clone())"
        )


def check_no_leaf(op: str, name: str, x: torch.Tensor) -> None:
    """For tensors that are changed in place under autograd; the error is torch's."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{op}: {name} is an inference tensor; it can't be changed in place outside "
            "torch.inference_mode() (use clone())"
        )
    if not x.requires_grad or not torch.is_grad_enabled():
        return
    for t, what in ((x, "a leaf"), (x._base, "a view of a leaf")):
        if t is not None and t.is_leaf:
            raise RuntimeError(
                f"{op}: {name} is {what} Variable that requires grad; it can't be changed in place "
                "(use torch.no_grad(), or the op that returns a new tensor)"
            )


def check_choice(op: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name} is {value!r}; it must be one of {', '.join(choices)}")


def check_dim(op: str, dim: object, x: torch.Tensor) -> int:
    """The dimension, counted from the front."""
    if not isinstance(dim, int):
        raise TypeError(f"{op}: dim is {dim!r}; it must be an integer")
    if x.dim() == 0:
        raise ValueError(f"{op}: x has no dimensions; it needs at least one")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op}: dim is {dim}; x has {x.dim()} dimensions")
    return dim % x.dim()


def check_adam(
    op: str, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        _check_number(op, name, value)
        if value < 0 or math.isinf(value):
            raise ValueError(f"{op}: {name} is {value}; it must be finite and >= 0")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"{op}: betas is {betas!r}; it must be two numbers")
    for name, value in (("betas[0]", betas[0]), ("betas[1]", betas[1])):
        _check_number(op, name, value)
        if not 0 <= value < 1:
            raise ValueError(f"{op}: {name} is {value}; it must be in [0, 1)")


def _check_number(op: str, name: str, value: object) -> None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} is {value!r}; it must be a number")
    if math.isnan(value):
        raise ValueError(f"{op}: {name} is nan; it must be a number")
