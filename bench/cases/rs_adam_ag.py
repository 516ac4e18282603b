"""rs_adam_ag: p = Adam(p, Σ_r g_r), the optimizer step of data-parallel training.

Gradients are summed, not averaged, so that no candidate needs a pass for the division. 16-bit
parameters have fp32 master weights in every candidate.

Floor per rank, for its slice of N/W parameters:
  fp32    load W gradients, m, v, p; store m, v, p to W ranks:        4 (2 W + 5) bytes each
  16 bit  load W gradients (2 bytes), m, v, master; store the three,
          p (2 bytes) to W ranks:                                     4 W + 24 bytes each
which makes 18 N bytes for fp32 on two ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

import coconet_ops as co

from ..check import fill, tile
from ..model import BenchError, Buffers, Candidate, Case, Expected, Problem

PARAMETER_SEED = 1000  # apart from the gradients' seeds, which are the ranks
# eps is large, so that the check sees the size of a gradient and not only its sign
HYPERPARAMETERS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 0.1, "weight_decay": 0.0}
CHECKED_CALLS = 3


def candidates(problem: Problem, buffers: Buffers) -> list[Candidate]:
    return [
        _optimizer(problem, buffers),
        _optimizer_with_copy(problem, buffers),
        _functional(problem, buffers),
    ]


def _optimizer(problem: Problem, buffers: Buffers) -> Candidate:
    """Gradients are already in the heap."""
    optimizer, parameters = _distributed_fused_adam(problem, buffers)
    gradients = buffers.private("gradients", layout_counts(problem), problem.dtype)
    torch.autograd.backward(parameters, gradients)  # a backward pass leaves gradients in the heap
    return Candidate(
        "coconet",
        load=lambda: load_gradients(problem, [p.grad for p in parameters]),
        run=optimizer.step,
        result=lambda: parameters,
    )


def _optimizer_with_copy(problem: Problem, buffers: Buffers) -> Candidate:
    """Gradients are private, as after zero_grad(set_to_none=True); the step copies them in."""
    optimizer, parameters = _distributed_fused_adam(problem, buffers)
    gradients = buffers.private("gradients", layout_counts(problem), problem.dtype)

    def run() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    return Candidate(
        "coconet + grad copy", lambda: load_gradients(problem, gradients), run, lambda: parameters
    )


def _functional(problem: Problem, buffers: Buffers) -> Candidate:
    """Parameters and gradients are private and go through the staging chunks."""
    parameters = initial_parameters(problem, buffers)
    gradients = buffers.private("gradients", layout_counts(problem), problem.dtype)
    state = co.AdamState(parameters, group=problem.comm)

    def run() -> None:
        co.rs_adam_ag_(parameters, gradients, state, average_grads=False, **HYPERPARAMETERS)

    return Candidate(
        "coconet private",
        load=lambda: load_gradients(problem, gradients),
        run=run,
        result=lambda: parameters,
        reset=lambda: initial_parameters(problem, buffers),  # other candidates use them too
    )


def _distributed_fused_adam(problem: Problem, buffers: Buffers):
    # the optimizer moves them into the heap
    parameters = [torch.nn.Parameter(p) for p in initial_parameters(problem, buffers)]
    optimizer = co.optim.DistributedFusedAdam(
        parameters, process_group=problem.comm, average_grads=False, **HYPERPARAMETERS
    )
    return optimizer, parameters


def initial_parameters(problem: Problem, buffers: Buffers) -> list[Tensor]:
    """Private parameters with the values that the check starts from."""
    parameters = buffers.private("parameters", layout_counts(problem), problem.dtype)
    fill(parameters, tile(PARAMETER_SEED, problem.dtype))
    return parameters


def load_gradients(problem: Problem, gradients: list[Tensor]) -> None:
    fill(gradients, tile(problem.rank, problem.dtype))


def layout_counts(problem: Problem) -> list[int]:
    """Elements of each parameter tensor."""
    if problem.layout == "flat":
        return [problem.count]
    bert = _bert_counts()
    spare = problem.count - len(bert)  # beside one element each
    if spare < 0:
        raise BenchError(f"layout bert needs at least {len(bert)} parameters, not {problem.count}")
    counts = [1 + n * spare // sum(bert) for n in bert]
    counts[0] += problem.count - sum(counts)
    return counts


def _bert_counts() -> list[int]:
    """The 200 parameter tensors of BERT-base with pooler and next-sentence head."""
    hidden, inner = 768, 3072
    norm = [hidden, hidden]
    attention = [hidden * hidden, hidden] * 4 + norm
    feed_forward = [inner * hidden, inner, hidden * inner, hidden] + norm
    embeddings = [30522 * hidden, 512 * hidden, 2 * hidden] + norm
    head = [hidden * hidden, hidden, 2 * hidden]
    return embeddings + 12 * (attention + feed_forward) + head


def expected(problem: Problem) -> Expected:
    parameter = tile(PARAMETER_SEED, problem.dtype).double()
    gradients = [tile(rank, problem.dtype).double() for rank in range(problem.world)]
    parameter.grad = torch.stack(gradients).sum(0)
    adam = torch.optim.Adam([parameter], **HYPERPARAMETERS)
    for _ in range(CHECKED_CALLS):
        adam.step()
    rounding = torch.finfo(problem.dtype).eps
    update = CHECKED_CALLS * HYPERPARAMETERS["lr"]
    return Expected(parameter, rounding * (2 * parameter.abs() + 8 * problem.world * update))


def moved_bytes(problem: Problem) -> float:
    world = problem.world
    fp32 = problem.dtype == torch.float32
    return problem.count / world * (8 * world + 20 if fp32 else 4 * world + 24)


CASE = Case(
    op="rs_adam_ag",
    summary="reduce-scatter, Adam on the own slice, all-gather",
    unit="parameters",
    sizes=(1 << 20, 1 << 22, 1 << 24),
    candidates=candidates,
    expected=expected,
    moved_bytes=moved_bytes,
    bus_factor=lambda world: 2 * (world - 1) / world,
    layouts=("flat", "bert"),
    checked_calls=CHECKED_CALLS,
)
