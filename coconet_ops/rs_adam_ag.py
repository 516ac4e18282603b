"""RS-Adam-AG: reduce-scatter of the gradients, Adam on the own slice, all-gather of the weights."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import torch

from . import _C, checks
from .collectives import all_gather
from .communicator import Communicator, Group, communicator, communicator_for
from .errors import MismatchError

_OP = "rs_adam_ag_"


class AdamState:
    """Adam's state for a list of parameters, for this rank's slice alone.

    The parameters are laid end to end, each start rounded up to 64 elements, and cut into
    ``world_size`` equal slices; borders fall anywhere. Collective.

    Args:
        params: dense tensors of one dtype (float32, bfloat16 or float16), equal on all ranks.
        group: process group, communicator or None (the default group).

    Attributes:
        layouts: shape and strides per parameter, equal on all ranks.
        exp_avg, exp_avg_sq: float32, 1-D, this rank's slice.
        master: float32 weights of the slice, for bfloat16 and float16 parameters; else None.
        steps: updates done, per parameter.
    """

    def __init__(self, params: Sequence[torch.Tensor], *, group: Group = None) -> None:
        first = params[0] if isinstance(params, Sequence) and params else None
        self.comm: Communicator = communicator_for(first, group)
        with checks.arguments(self.comm, _OP):
            params = list(params)
            check_params(self.comm, params)
        # The kernel walks memory, so all ranks use one layout per parameter: that of rank 0.
        self.layouts = _agree_on_layouts(self.comm, params)
        self._list = _tensor_list(self.comm, [p.numel() for p in params])
        self.dtype = params[0].dtype
        self._layouts = _C.Layouts(self.layouts, self.dtype, self.comm.device)
        numel = self._list.slice
        device = self.comm.device
        self.exp_avg = torch.zeros(numel, dtype=torch.float32, device=device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.master: torch.Tensor | None = None
        if self.dtype != torch.float32:
            self.master = torch.zeros_like(self.exp_avg)
            self.reload_master(params)
        self._seen: list[tuple[int, int]] = []

    @property
    def steps(self) -> list[int]:
        return self._list.steps

    def pieces(self, rank: int | None = None) -> list[tuple[int, int, int, int]]:
        """(parameter, first element in it, first element in the slice, elements) for each piece of
        a rank's slice; elements in memory order. Default: the own rank."""
        return self._list.pieces(self.comm.rank if rank is None else rank)

    def reload_master(self, params: Sequence[torch.Tensor], only: set[int] | None = None) -> None:
        """Takes the fp32 master weights from the parameters again (all, or the given indices)."""
        if self.master is None:
            return
        for index, first, at, count in self.pieces():
            if only is None or index in only:
                laid_out = in_layout(params[index].detach(), self.layouts[index])
                self.master[at : at + count].copy_(memory_order(laid_out)[first : first + count])

    def take_up_changes(self, params: Sequence[torch.Tensor]) -> None:
        """The master follows parameters that were changed since the last step (loaded weights)."""
        if self.master is None or self._seen == _versions(params):
            return
        for index, first, at, count in self.pieces():
            weights = memory_order(params[index].detach())[first : first + count]
            master = self.master[at : at + count]
            changed = master.to(self.dtype) != weights
            if changed.any():
                master[changed] = weights[changed].float()

    def remember(self, params: Sequence[torch.Tensor]) -> None:
        """After a step: what the parameters are now."""
        if self.master is not None:
            self._seen = _versions(params)


def _tensor_list(comm: Communicator, numels: list[int]) -> _C.TensorList | _C.DeviceTensors:
    try:
        return comm._core.tensor_list(numels)
    except MemoryError as error:
        # On devices a rank takes room for itself, so its peers don't know.
        if isinstance(comm._core, _C.DeviceCommunicator):
            comm._core.reject(_OP, str(error))
        raise


def _versions(params: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(p.data_ptr(), p._version) for p in params]


def rs_adam_ag_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    state: AdamState,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    average_grads: bool = True,
    group: Group = None,
) -> None:
    """One Adam step on every rank, in one pass: each rank reduces its slice of the gradients,
    updates state and weights of that slice, and writes the new weights to all ranks.

    Unfused: all-reduce of the gradients, then ``torch.optim.Adam`` or ``AdamW`` on every rank
    (:func:`coconet_ops.reference.rs_adam_ag_`). CoCoNet (arXiv 2105.05720), section 6.

    Zero-copy when all parameters and gradients are in the heap on every rank; otherwise they go
    through the staging areas.

    Args:
        params: the tensors of ``state``, equal on all ranks; updated in place.
        grads: one per parameter, of its shape and dtype. None counts as zero; a parameter without
            gradient on every rank is skipped, as in torch.optim.
        state: this rank's :class:`AdamState`; updated in place.
        lr, betas, eps, weight_decay: as in ``torch.optim.Adam``.
        adam_w_mode: decoupled weight decay (AdamW) rather than L2.
        bias_correction: as in Adam; False leaves it out.
        average_grads: average gradients over the ranks rather than sum them.
        group: for symmetry with the other ops; the state knows its communicator.

    Raises: as :func:`coconet_ops.all_reduce`; hyperparameters are compared across ranks too.
    """
    comm = state.comm
    with checks.arguments(comm, _OP):
        if group is not None and communicator(group, comm.device.type) is not comm:
            raise ValueError(f"{_OP}: group is not the communicator of state")
        params, grads = list(params), list(grads)
        ready = state._layouts.hold(params, grads)  # as a rule; Python is slow at finding out
        if not ready:
            _check_lists(state, params, grads)
        hyper = make_hyper(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            adam_w_mode=adam_w_mode,
            bias_correction=bias_correction,
            average_grads=average_grads,
        )
    if ready:
        step(state, params, grads, hyper)
        return
    weights = [in_layout(p, layout) for p, layout in zip(params, state.layouts, strict=True)]
    gradients = [
        g if g is None else in_layout(g, layout)
        for g, layout in zip(grads, state.layouts, strict=True)
    ]
    step(state, weights, gradients, hyper)
    for p, w in zip(params, weights, strict=True):
        if w is not p:
            with torch.no_grad():
                p.copy_(w)


def make_hyper(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adam_w_mode: bool,
    bias_correction: bool,
    average_grads: bool,
) -> _C.AdamHyper:
    """Checked hyperparameters."""
    checks.check_adam(_OP, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return _C.AdamHyper(
        lr=float(lr),
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        eps=float(eps),
        weight_decay=float(weight_decay),
        adam_w_mode=bool(adam_w_mode),
        bias_correction=bool(bias_correction),
        average_grads=bool(average_grads),
    )


def step(
    state: AdamState,
    params: list[torch.Tensor],
    grads: list[torch.Tensor | None] | None,
    hyper: _C.AdamHyper,
) -> None:
    """The step itself; arguments are checked and dense. grads None: each parameter's own."""
    state.take_up_changes(params)
    _C.adam_step(state._list, params, grads, hyper, state.exp_avg, state.exp_avg_sq, state.master)
    # As any in-place change: autograd notices a stale saved weight.
    torch.autograd.graph.increment_version(params)
    state.remember(params)


def check_params(comm: Communicator, params: list[torch.Tensor]) -> None:
    if not params:
        raise ValueError(f"{_OP}: params is empty; it needs at least one tensor")
    for i, p in enumerate(params):
        checks.check_tensor(comm, _OP, f"params[{i}]", p)
        if p.dtype != params[0].dtype:
            raise TypeError(
                f"{_OP}: params[{i}] has dtype {p.dtype} but params[0] has {params[0].dtype}; "
                "one state takes one dtype"
            )


def check_grad(comm: Communicator, i: int, param: torch.Tensor, grad: torch.Tensor) -> None:
    name = f"grads[{i}]"
    checks.check_tensor(comm, _OP, name, grad)
    if grad.dtype != param.dtype:
        raise TypeError(f"{_OP}: {name} has dtype {grad.dtype} but its parameter {param.dtype}")
    if grad.shape != param.shape:
        raise ValueError(
            f"{_OP}: {name} has shape {list(grad.shape)} but its parameter {list(param.shape)}"
        )


def _check_lists(
    state: AdamState, params: list[torch.Tensor], grads: list[torch.Tensor | None]
) -> None:
    check_params(state.comm, params)
    _check_same_params(state, params)
    if len(grads) != len(params):
        raise ValueError(f"{_OP}: there are {len(grads)} grads for {len(params)} params")
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        checks.check_writable(_OP, f"params[{i}]", p)
        if g is not None:
            check_grad(state.comm, i, p, g)


def _check_same_params(state: AdamState, params: list[torch.Tensor]) -> None:
    if len(params) != len(state.layouts):
        raise ValueError(
            f"{_OP}: there are {len(params)} params; state was made for {len(state.layouts)}"
        )
    if params[0].dtype != state.dtype:
        raise TypeError(
            f"{_OP}: params have dtype {params[0].dtype}; state was made for {state.dtype}"
        )
    for i, (p, (shape, _)) in enumerate(zip(params, state.layouts, strict=True)):
        if tuple(p.shape) != shape:
            raise ValueError(
                f"{_OP}: params[{i}] has shape {list(p.shape)}; state was made for {list(shape)}"
            )


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides


def _layout(t: torch.Tensor) -> Layout:
    """Shape and strides of t; contiguous ones where t doesn't fill one stretch of memory."""
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(t)
    model = t if dense else torch.empty(t.shape, device="meta")
    return tuple(t.shape), model.stride()


def _agree_on_layouts(comm: Communicator, params: list[torch.Tensor]) -> list[Layout]:
    """Rank 0's layouts. Raises on every rank unless numbers, shapes and dtypes are equal."""
    mine = repr([(str(p.dtype), *_layout(p)) for p in params]).encode()
    sizes = all_gather(torch.tensor([len(mine)], device=comm.device), group=comm).tolist()
    text = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(comm.device)
    texts = all_gather(text, size=sum(sizes), group=comm)
    ranks = [ast.literal_eval(bytes(t.tolist()).decode()) for t in texts.split(sizes)]

    def same(what: str, values: list) -> None:
        if any(v != values[0] for v in values):
            each = "; ".join(f"{v} on rank {r}" for r, v in enumerate(values))
            raise MismatchError(f"{_OP}: ranks disagree on {what}: {each}")

    same("the number of parameters", [len(r) for r in ranks])
    for i in range(len(params)):
        same(f"the dtype of params[{i}]", [r[i][0] for r in ranks])
        same(f"the shape of params[{i}]", [list(r[i][1]) for r in ranks])
    return [(shape, strides) for _, shape, strides in ranks[0]]


def in_layout(t: torch.Tensor, layout: Layout) -> torch.Tensor:
    """t itself where its memory has the layout, otherwise a copy that has it."""
    if t.stride() == layout[1] and not t.is_neg():
        return t
    return torch.empty_strided(*layout, dtype=t.dtype, device=t.device).copy_(t.detach())


def memory_order(t: torch.Tensor) -> torch.Tensor:
    """A dense tensor as a 1-D view of its memory."""
    return t.as_strided((t.numel(),), (1,))
