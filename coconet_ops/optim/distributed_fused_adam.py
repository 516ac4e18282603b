"""Adam whose step reduces gradients, updates this rank's slice and gathers the weights at once."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import _C, checks
from ..collectives import all_gather
from ..communicator import Communicator, Group, communicator_for
from ..errors import MismatchError
from ..rs_adam_ag import (
    AdamState,
    check_grad,
    check_params,
    make_hyper,
    rs_adam_ag_,
    step,
)

_NAME = "DistributedFusedAdam"

# torch patches the class when its first object is made, and ranks may be threads.
_first_object = threading.RLock()


class _Shard:
    """The parameters of one group and dtype, which one fused call updates."""

    def __init__(self, comm: Communicator, group: dict, params: list[torch.nn.Parameter]) -> None:
        self.group = group
        self.params = params
        self.state = AdamState(params, group=comm)
        self.homes: _C.Homes | None = None

    def rehome(self, comm: Communicator) -> None:
        """Moves the weights into the heap and gives every gradient a buffer there."""
        dtype, layouts = self.state.dtype, self.state.layouts
        self.weights = [_heap_tensor(comm, dtype, *layout) for layout in layouts]
        self.gradients = [_heap_tensor(comm, dtype, *layout) for layout in layouts]
        self.homes = _C.Homes(self.weights, self.gradients)
        hooks = []
        for p, weight, gradient in zip(self.params, self.weights, self.gradients, strict=True):
            _move_in(p, p.data, weight)
            if p.requires_grad:
                hooks.append(p.register_post_accumulate_grad_hook(_keep_gradient_in(gradient)))
        # The hooks hold the gradient buffers; parameters outlive their optimizer.
        weakref.finalize(self, _remove, hooks)

    def strays(self, comm: Communicator) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """What the user assigned since the last step, by index: weights and gradients."""
        replaced, foreign = self.homes.strays(self.params)
        with checks.arguments(comm, "rs_adam_ag_"):
            for i in replaced:
                _check_replaced(comm, i, self.params[i], self.weights[i])
            for i in foreign:
                check_grad(comm, i, self.weights[i], self.params[i].grad)

        def safe(t: torch.Tensor) -> torch.Tensor:
            # It may be another parameter's buffer, which is about to be written itself.
            return t.clone() if comm.owns(t) else t

        weights = {i: safe(self.params[i].data) for i in replaced}
        return weights, {i: safe(self.params[i].grad) for i in foreign}

    def take_up(self, weights: dict[int, torch.Tensor], gradients: dict[int, torch.Tensor]) -> None:
        """Copies strays in, and re-points the parameters and gradients to their homes."""
        for i, t in weights.items():
            _move_in(self.params[i], t, self.weights[i])
        if weights:
            self.state.reload_master(self.params, set(weights))
        for i, t in gradients.items():
            _move_gradient_in(self.params[i], t, self.gradients[i])


def _first_tensor(params: object) -> object:
    """The first parameter of a list, or of a list of groups, if it can be had without iterating."""
    first = params[0] if isinstance(params, list) and params else None
    if isinstance(first, dict):
        inner = first.get("params")
        first = inner[0] if isinstance(inner, (list, tuple)) and inner else inner
    return first


class DistributedFusedAdam(torch.optim.Optimizer):
    """Adam or AdamW, data-parallel: each step is one fused pass of reduce-scatter, update and
    all-gather (:func:`coconet_ops.rs_adam_ag_`). Don't all-reduce gradients yourself.

    Collective: all ranks construct it together, with equal parameters in the same order. State
    (two fp32 moments, and an fp32 master for bfloat16 and float16 parameters) exists only for this
    rank's slice: its memory is 1 / world size.

    The constructor moves parameters into the communicator's heap (``p.data`` is re-pointed) and
    gives gradients buffers there, so a step copies nothing. A gradient that autograd makes anew
    after ``zero_grad()`` is moved into its buffer as soon as it is accumulated; gradients and
    ``p.data`` that you assign yourself are copied in at the next step. A ``p.grad`` that you keep
    from an earlier step is that buffer and sees later gradients: clone it.

    Args:
        params: parameters or groups, as in torch.optim; float32, bfloat16 or float16. Groups may
            have their own lr, betas, eps, weight_decay and bias_correction.
        lr, betas, eps, weight_decay: as in ``torch.optim.Adam``.
        bias_correction: False leaves Adam's bias correction out.
        adam_w_mode: decoupled weight decay (AdamW) rather than L2 (Adam).
        process_group: process group, communicator or None (the default group).
        average_grads: average gradients over the ranks rather than sum them.
        broadcast_params: start from rank 0's parameters. Otherwise they are compared.
        rehome: False leaves parameters and gradients where they are; steps then go through the
            staging areas, with the same result.

    Raises:
        MismatchError: the ranks' parameters differ (tells which), or their hyperparameters.
        TypeError, ValueError: unsupported parameters, gradients or hyperparameters.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        *,
        process_group: Group = None,
        average_grads: bool = True,
        broadcast_params: bool = False,
        rehome: bool = True,
    ) -> None:
        if not isinstance(params, (torch.Tensor, dict)) and isinstance(params, Iterable):
            params = list(params)
        self._comm = communicator_for(_first_tensor(params), process_group)
        self._adam_w_mode = adam_w_mode
        self._average_grads = average_grads
        self._broadcast_params = broadcast_params
        self._rehome = rehome
        self._shards: list[_Shard] = []
        self._constructed = False
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        with checks.arguments(self._comm, "all_gather"), _first_object:
            super().__init__(params, defaults)
        for index in range(len(self.param_groups)):
            self._adopt(index)
        self._constructed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; collective."""
        # The constructor checks its groups, and adopts them when all are known to be good.
        if not self._constructed:
            super().add_param_group(param_group)
            return
        with checks.arguments(self._comm, "all_gather"):
            super().add_param_group(param_group)
        self._adopt(len(self.param_groups) - 1)

    @torch.no_grad()
    def _adopt(self, index: int) -> None:
        group = self.param_groups[index]
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        with checks.arguments(self._comm, "all_gather"):
            for p in group["params"]:
                by_dtype.setdefault(p.dtype, []).append(p)
            for params in by_dtype.values():
                check_params(self._comm, params)
            make_hyper(**self._hyperparameters(group))
        shards = [_Shard(self._comm, group, params) for params in by_dtype.values()]
        if self._broadcast_params:
            for p in group["params"]:
                _broadcast(self._comm, p)
            for shard in shards:
                shard.state.reload_master(shard.params)
        else:
            _compare(self._comm, index, group["params"])
        if self._rehome:
            for shard in shards:
                shard.rehome(self._comm)
        self._shards += shards

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        names = ("lr", "betas", "eps", "weight_decay", "bias_correction")
        return {
            **{name: group[name] for name in names},
            "adam_w_mode": self._adam_w_mode,
            "average_grads": self._average_grads,
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every group; collective. Returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        homed = [shard for shard in self._shards if shard.homes is not None]
        strays = [shard.strays(self._comm) for shard in homed]
        for shard, (weights, gradients) in zip(homed, strays, strict=True):
            shard.take_up(weights, gradients)
        for shard in self._shards:
            hyper = self._hyperparameters(shard.group)
            if shard.homes is None:
                grads = [p.grad for p in shard.params]
                rs_adam_ag_(shard.params, grads, shard.state, **hyper)
            else:
                with checks.arguments(self._comm, "rs_adam_ag_"):
                    checked = make_hyper(**hyper)
                step(shard.state, shard.params, None, checked)
        return loss

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError(
            f"{_NAME}: saving the sharded state is not supported in this version"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError(
            f"{_NAME}: loading the sharded state is not supported in this version"
        )


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _heap_tensor(
    comm: Communicator, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    return comm.empty(math.prod(shape), dtype=dtype).as_strided(shape, strides)


def _move_in(p: torch.Tensor, weight: torch.Tensor, home: torch.Tensor) -> None:
    home.copy_(weight)
    p.data = home


def _move_gradient_in(p: torch.Tensor, gradient: torch.Tensor, home: torch.Tensor) -> None:
    home.copy_(gradient)
    # An alias: whatever is done to p.grad, its data re-pointed even, home stays what it is.
    p.grad = home.detach()


def _keep_gradient_in(home: torch.Tensor) -> Callable[[torch.Tensor], None]:
    address = home.data_ptr()

    @torch.no_grad()
    def hook(p: torch.Tensor) -> None:
        # Sparse gradients are refused in step().
        if p.grad.layout is torch.strided and p.grad.data_ptr() != address:
            _move_gradient_in(p, p.grad, home)

    return hook


def _check_replaced(comm: Communicator, i: int, p: torch.Tensor, home: torch.Tensor) -> None:
    checks.check_tensor(comm, _NAME, f"params[{i}]", p, dtypes=(home.dtype,))
    if p.shape != home.shape:
        raise ValueError(
            f"{_NAME}: params[{i}] was replaced by a tensor of shape {list(p.shape)}; "
            f"it had {list(home.shape)}"
        )


def _compare(comm: Communicator, group: int, params: list[torch.Tensor]) -> None:
    """Raises on every rank unless all ranks have the same values."""
    hashes = [_C.hash_bytes(p.cpu().contiguous()) for p in params]
    mine = torch.tensor([hashes], dtype=torch.int64, device=comm.device)
    everyone = all_gather(mine, group=comm)
    differs = everyone != everyone[0]
    if not differs.any():
        return
    index = int(differs.any(0).nonzero()[0])
    raise MismatchError(
        f"{_NAME}: parameter {index} of group {group} (shape {list(params[index].shape)}) has "
        f"other values on ranks {differs[:, index].nonzero().flatten().tolist()} than on rank 0; "
        "broadcast_params=True starts from rank 0's"
    )


def _broadcast(comm: Communicator, p: torch.Tensor) -> None:
    """Rank 0's values, as the only shard with rows."""
    flat = p.detach().reshape(-1)
    p.copy_(all_gather(flat if comm.rank == 0 else flat[:0], group=comm).view(p.shape))
