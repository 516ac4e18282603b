"""DistributedFusedAdam: torch.optim's Adam and AdamW on averaged gradients, state sharded."""

from __future__ import annotations

import copy
import gc
import io
import re

import cases
import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, OPTIMIZER_TOLERANCE, TOLERANCE, Adam64
from harness import (
    assert_same_on_all_ranks,
    communicator,
    fused_adam,
    new_communicator,
    raised,
    run_fresh,
    seeded,
    values,
)
from torch import nn

import coconet_ops as co
from coconet_ops.optim import DistributedFusedAdam

pytestmark = pytest.mark.backends("local", "emulated", "cuda")

STEPS = 25


def odd_parameters(dtype):
    """Parameters of every shape and memory format, the same on all ranks."""
    tensors = [
        cases.normals((3, 5, 7), dtype, 0, 1),
        cases.normals((), dtype, 0, 2),
        cases.normals((0,), dtype, 0, 3),
        cases.normals((1134,), dtype, 0, 4),
        cases.normals((129, 3), dtype, 0, 5).t(),
        cases.normals((2, 3, 4, 5), dtype, 0, 6).to(memory_format=torch.channels_last),
        cases.normals((20, 8), dtype, 0, 7)[:, 1:4],
        cases.normals((1,), dtype, 0, 8),
        cases.normals((1023, 7), dtype, 0, 9),
    ]
    return [nn.Parameter(tensor) for tensor in tensors]


def average_gradients(params, step, average=True):
    """(own gradients, float64 averages over the ranks) for this step."""
    rank, world = communicator().rank, communicator().world_size
    own, averages = [], []
    for index, p in enumerate(params):
        by_rank = [
            cases.gradient(p.shape, p.dtype, other, 100 * step + index) for other in range(world)
        ]
        own.append(by_rank[rank])
        averages.append(cases.reduced(by_rank, "avg" if average else "sum"))
    return own, averages


def backward(params, gradients):
    """Autograd gives exactly these gradients."""
    sum((p * grad).sum() for p, grad in zip(params, gradients, strict=True)).backward()


def check(params, oracle, what):
    for index, (p, expected) in enumerate(zip(params, oracle, strict=True)):
        tolerance = {
            key: OPTIMIZER_TOLERANCE[key]
            + (TOLERANCE[p.dtype][key] if p.dtype != torch.float32 else 0)
            for key in ("rtol", "atol")
        }
        cases.assert_close(p.detach(), expected.detach(), tolerance, f"{what}: parameter {index}")


def digest(params):
    return [cases.digest(p) for p in params]


# --- where the gradients come from ---------------------------------------------------------------


def deliver_by_autograd(optimizer, params, gradients):
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)
    backward(params, gradients)


def deliver_into_zeros(optimizer, params, gradients):
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is None or (p.grad == 0).all() for p in params)
    backward(params, gradients)


def deliver_in_two_halves(optimizer, params, gradients):
    optimizer.zero_grad()
    halves = [grad / 2 for grad in gradients]
    backward(params, halves)
    backward(params, halves)


def deliver_by_assignment(optimizer, params, gradients):
    for p, grad in zip(params, gradients, strict=True):
        p.grad = grad.clone()


def deliver_by_assignment_in_the_parameter_s_format(optimizer, params, gradients):
    for p, grad in zip(params, gradients, strict=True):
        p.grad = torch.empty_like(p).copy_(grad)


def deliver_by_copying(optimizer, params, gradients):
    for p, grad in zip(params, gradients, strict=True):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.copy_(grad)


def deliver_to_data(optimizer, params, gradients):
    for p, grad in zip(params, gradients, strict=True):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.data = grad.clone()


DELIVERIES = (
    deliver_by_autograd,
    deliver_into_zeros,
    deliver_in_two_halves,
    deliver_by_assignment,
    deliver_by_assignment_in_the_parameter_s_format,
    deliver_by_copying,
    deliver_to_data,
)


def follows_float64(dtype, deliver, options):
    params = odd_parameters(dtype)
    optimizer = fused_adam(params, lr=1e-2, weight_decay=0.125, **options)
    oracle = Adam64(params, options.get("adam_w_mode", True), options.get("bias_correction", True))
    digests = []
    for step in range(STEPS):
        own, averages = average_gradients(params, step, options.get("average_grads", True))
        deliver(optimizer, params, own)
        optimizer.step()
        oracle.step(averages, lr=1e-2, weight_decay=0.125)
        check(params, oracle.params, f"step {step}")
        digests.append(digest(params))
    return digests


@pytest.mark.parametrize("deliver", DELIVERIES, ids=lambda f: f.__name__.removeprefix("deliver_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_follows_float64_however_the_gradients_arrive(run_few, dtype, deliver):
    assert_same_on_all_ranks(run_few(follows_float64, dtype, deliver, {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_follows_float64_for_any_world_size(run, dtype):
    assert_same_on_all_ranks(run(follows_float64, dtype, deliver_by_autograd, {}))


@pytest.mark.parametrize(
    "options",
    [
        {"adam_w_mode": False},
        {"bias_correction": False},
        {"adam_w_mode": False, "bias_correction": False},
        {"average_grads": False},
        {"rehome": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_follows_float64_in_every_mode(run_few, dtype, options):
    assert_same_on_all_ranks(run_few(follows_float64, dtype, deliver_by_autograd, options))


def layout_by_rank(dtype, options):
    rank = communicator().rank
    values = cases.normals((2, 3, 4, 5), dtype, 0, 1), cases.normals((129, 3), dtype, 0, 2)
    params = [
        nn.Parameter(
            values[0].to(memory_format=torch.channels_last) if rank == 1 else values[0].clone()
        ),
        nn.Parameter(values[1].t().contiguous().t() if rank == 0 else values[1].clone()),
    ]
    optimizer = fused_adam(params, lr=1e-2, **options)
    oracle = Adam64(params)
    for step in range(5):
        own, averages = average_gradients(params, step)
        deliver_by_autograd(optimizer, params, own)
        optimizer.step()
        oracle.step(averages, lr=1e-2)
        check(params, oracle.params, f"step {step}")
    return digest(params)


@pytest.mark.parametrize("options", [{}, {"rehome": False}, {"broadcast_params": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_memory_formats_may_differ_between_ranks(run_few, dtype, options):
    assert_same_on_all_ranks(run_few(layout_by_rank, dtype, options))


def permuted(what):
    """The user exchanges gradients, or weights, that already lie in the heap."""
    params = [nn.Parameter(cases.normals((40,), torch.float32, 0, seed)) for seed in range(4)]
    optimizer = fused_adam(params, lr=1e-2)
    oracle = Adam64(params)
    for step in range(5):
        own, averages = average_gradients(params, step)
        deliver_by_autograd(optimizer, params, own)
        order = [2, 0, 3, 1]
        if what == "gradients":
            moved = [params[i].grad for i in order]
            for p, grad in zip(params, moved, strict=True):
                p.grad = grad
            averages = [averages[i] for i in order]
        else:
            moved = [params[i].data for i in order]
            for p, data in zip(params, moved, strict=True):
                p.data = data
            values = [oracle.params[i].detach().clone() for i in order]
            for p, value in zip(oracle.params, values, strict=True):
                p.data.copy_(value)
        optimizer.step()
        oracle.step(averages, lr=1e-2)
        check(params, oracle.params, f"step {step}")


@pytest.mark.parametrize("what", ["gradients", "weights"])
def test_exchanged_gradients_and_weights_are_not_lost(run_few, what):
    run_few(permuted, what)


def mixed_dtypes():
    """One optimizer over parameters of several dtypes."""
    params = [
        nn.Parameter(cases.normals((130, 3), dtype, 0, seed)) for seed, dtype in enumerate(DTYPES)
    ]
    optimizer = fused_adam(params, lr=1e-2)
    oracle = Adam64(params)
    for step in range(STEPS):
        own, averages = average_gradients(params, step)
        deliver_by_autograd(optimizer, params, own)
        optimizer.step()
        oracle.step(averages, lr=1e-2, weight_decay=0.0)
        check(params, oracle.params, f"step {step}")


def test_parameters_of_several_dtypes(run_few):
    run_few(mixed_dtypes)


# --- parameter groups, schedulers ----------------------------------------------------------------


def several_groups(dtype):
    params = odd_parameters(dtype)
    hypers = [
        {"lr": 1e-2},
        {"lr": 1e-3, "betas": (0.5, 0.9), "weight_decay": 0.3},
        {"lr": 3e-3, "eps": 1e-3, "bias_correction": False},
    ]
    groups = [{"params": params[i::3], **hyper} for i, hyper in enumerate(hypers)]
    optimizer = fused_adam(groups, lr=1.0, weight_decay=0.05)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3, 3e-3]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.3, 0.05]
    oracles = [
        Adam64(params[i::3], bias_correction=hyper.get("bias_correction", True))
        for i, hyper in enumerate(hypers)
    ]
    for step in range(STEPS):
        own, averages = average_gradients(params, step)
        deliver_by_autograd(optimizer, params, own)
        optimizer.step()
        for i, (oracle, hyper) in enumerate(zip(oracles, hypers, strict=True)):
            hyper = {"weight_decay": 0.05, **hyper}
            hyper.pop("bias_correction", None)
            oracle.step(averages[i::3], **hyper)
            check(params[i::3], oracle.params, f"group {i}, step {step}")
    return digest(params)


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_groups_have_their_own_hyperparameters(run_few, dtype):
    assert_same_on_all_ranks(run_few(several_groups, dtype))


def scheduled():
    params = odd_parameters(torch.float32)
    groups = [{"params": params[:4]}, {"params": params[4:], "lr": 2e-3}]
    optimizer = fused_adam(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 5),
        ],
        [5],
    )
    oracle = [p.detach().double().clone().requires_grad_() for p in params]
    twin = torch.optim.AdamW(
        [{"params": oracle[:4]}, {"params": oracle[4:], "lr": 2e-3}], lr=1e-2, weight_decay=0.0
    )
    twin_scheduler = torch.optim.lr_scheduler.SequentialLR(
        twin,
        [
            torch.optim.lr_scheduler.LinearLR(twin, 0.1, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(twin, STEPS - 5),
        ],
        [5],
    )
    for step in range(STEPS):
        own, averages = average_gradients(params, step)
        deliver_by_autograd(optimizer, params, own)
        for p, grad in zip(oracle, averages, strict=True):
            p.grad = grad
        for one, its_scheduler in ((optimizer, scheduler), (twin, twin_scheduler)):
            one.step()
            its_scheduler.step()
        check(params, oracle, f"step {step}")


def test_learning_rate_scheduler(run_few):
    run_few(scheduled)


def group_added_later():
    params = odd_parameters(torch.float32)
    optimizer = fused_adam(params[:3], lr=1e-2)
    oracles = [Adam64(params[:3])]
    for step in range(10):
        if step == 4:
            optimizer.add_param_group({"params": params[3:], "lr": 1e-3})
            oracles.append(Adam64(params[3:]))
        own, averages = average_gradients(params, step)
        known = len(params) if step >= 4 else 3
        deliver_by_autograd(optimizer, params[:known], own[:known])
        optimizer.step()
        oracles[0].step(averages[:3], lr=1e-2)
        check(params[:3], oracles[0].params, f"step {step}")
        if step >= 4:
            oracles[1].step(averages[3:], lr=1e-3)
            check(params[3:], oracles[1].params, f"added group, step {step}")


def test_group_added_after_construction(run_few):
    run_few(group_added_later)


# --- gradients that are missing ------------------------------------------------------------------


def some_missing(dtype):
    params = odd_parameters(dtype)
    optimizer = fused_adam(params, lr=1e-2, weight_decay=0.125)
    oracle = Adam64(params)
    rank, world = communicator().rank, communicator().world_size
    for step in range(STEPS):
        optimizer.zero_grad()
        before = digest(params)
        averages = []
        for index, p in enumerate(params):
            present = [r for r in range(world) if (index + step + r) % 3]
            grads = {r: cases.gradient(p.shape, dtype, r, 100 * step + index) for r in present}
            if rank in grads:
                (p * grads[rank]).sum().backward()
            averages.append(cases.reduced(list(grads.values())) / world if grads else None)
        optimizer.step()
        oracle.step(averages, lr=1e-2, weight_decay=0.125)
        check(params, oracle.params, f"step {step}")
        for old, new, average in zip(before, digest(params), averages, strict=True):
            assert average is not None or old == new, "a parameter without gradient changed"
    return digest(params)


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_missing_gradient_is_zero_and_missing_everywhere_skips(run, dtype):
    assert_same_on_all_ranks(run(some_missing, dtype))


def frozen():
    params = odd_parameters(torch.float32)
    params[0].requires_grad_(False)
    params[3].requires_grad_(False)
    optimizer = fused_adam(params, lr=1e-2, weight_decay=0.125)
    before = digest(params)
    sum(p.sum() for p in params).backward()
    optimizer.step()
    changed = [old != new for old, new in zip(before, digest(params), strict=True)]
    assert not changed[0] and not changed[3] and changed[1] and changed[4]


def test_frozen_parameters_stay(run_few):
    run_few(frozen)


def no_gradient_at_all():
    params = odd_parameters(torch.float32)
    optimizer = fused_adam(params, lr=1e-2, weight_decay=0.125)
    before = digest(params)
    optimizer.step()
    optimizer.step()
    assert digest(params) == before


def test_step_without_gradients_changes_nothing(run_few):
    run_few(no_gradient_at_all)


def unused_branch():
    """Each rank uses another part of the model, as in conditional computation."""
    rank, world = communicator().rank, communicator().world_size
    with seeded(0):
        branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(world + 1))
    optimizer = fused_adam(branches.parameters(), lr=0.1)
    before = [digest(branch.parameters()) for branch in branches]
    for _ in range(3):
        optimizer.zero_grad()
        branches[rank](torch.ones(4)).sum().backward()
        optimizer.step()
    after = [digest(branch.parameters()) for branch in branches]
    assert all(old != new for old, new in zip(before[:-1], after[:-1], strict=True))
    assert before[-1] == after[-1]
    return after


def test_ranks_may_use_different_parts_of_the_model(run_few):
    assert_same_on_all_ranks(run_few(unused_branch))


# --- memory --------------------------------------------------------------------------------------


def lives_in_the_heap():
    comm = communicator()
    params = odd_parameters(torch.float32)
    values_before = [p.detach().clone() for p in params]
    optimizer = fused_adam(params, lr=1e-2)
    for p, value in zip(params, values_before, strict=True):
        assert comm.owns(p) or p.numel() == 0
        assert torch.equal(p, value) and isinstance(p, nn.Parameter) and p.is_leaf
        assert p.untyped_storage().nbytes() == p.nbytes
    for _ in range(3):
        optimizer.zero_grad()
        backward(params, values_before)
        for p, value in zip(params, values_before, strict=True):
            assert comm.owns(p.grad) or p.numel() == 0
            assert torch.equal(p.grad, value)
        addresses = [p.data_ptr() for p in params]
        grad_addresses = [p.grad.data_ptr() for p in params]
        optimizer.step()
        assert addresses == [p.data_ptr() for p in params], "the step moved a parameter"
        assert grad_addresses == [p.grad.data_ptr() for p in params]
        for p, value in zip(params, values_before, strict=True):
            assert torch.equal(p.grad, value), "the step changed a gradient"


def test_parameters_and_gradients_live_in_the_heap(run_few):
    run_few(lives_in_the_heap)


# Python collects the garbage of all threads at once, or not: what is left in the heap is exact for
# ranks that are processes.


def optimizers_come_and_go():
    """What an optimizer took of the heap is free again when it is gone, though the model stays."""
    comm = communicator()
    model = nn.Linear(1000, 100)
    for p in model.parameters():
        nn.init.ones_(p)
    allocated = []
    for _ in range(4):
        optimizer = fused_adam(model.parameters(), lr=1e-2)
        model(torch.ones(1000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del optimizer
        gc.collect()
        comm.empty(1)
        allocated.append(comm.heap_allocated)
    assert len(set(allocated)) == 1, allocated


@pytest.mark.backends()
def test_optimizers_of_one_model_come_and_go(run_few):
    run_few(optimizers_come_and_go)


def small_heap():
    with new_communicator(heap_bytes=4 << 20) as comm:
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(1000, 1500))
        for p in model.parameters():
            nn.init.ones_(p)
        before = digest(model.parameters())
        name, message, _ = raised(
            lambda: DistributedFusedAdam(model.parameters(), process_group=comm)
        )
        assert name == "MemoryError" and "heap_bytes" in message, (name, message)
        assert digest(model.parameters()) == before
        assert (co.all_reduce(torch.ones(9), group=comm) == comm.world_size).all()


def test_heap_that_is_too_small_is_an_error_on_every_rank(run_few):
    run_few(small_heap)


def heap_does_not_grow():
    comm = communicator()
    params = odd_parameters(torch.float32)
    optimizer = fused_adam(params, lr=1e-2)
    own, _ = average_gradients(params, 0)
    allocated = []
    for step in range(6):
        deliver = DELIVERIES[step % len(DELIVERIES)]
        deliver(optimizer, params, own)
        optimizer.step()
        allocated.append(comm.heap_allocated)
    assert len(set(allocated)) == 1, allocated
    del optimizer, params, own
    gc.collect()
    comm.empty(1)
    assert comm.heap_allocated < allocated[0]


@pytest.mark.backends()
def test_steps_allocate_nothing_in_the_heap(run_few):
    run_few(heap_does_not_grow)


def state_tensors(optimizer):
    """The tensors that the optimizer holds beside parameters and gradients."""
    found, seen = {}, set()

    def visit(value, depth=0):
        if id(value) in seen or depth > 8 or isinstance(value, nn.Parameter):
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for key, inner in value.items():
                visit(key, depth + 1)
                visit(inner, depth + 1)
        elif isinstance(value, (list, tuple, set)):
            for inner in value:
                visit(inner, depth + 1)
        elif type(value).__module__.startswith("coconet_ops"):
            names = list(getattr(value, "__dict__", {})) + list(getattr(value, "__slots__", ()))
            names += ["exp_avg", "exp_avg_sq", "master"]
            for name in names:
                visit(getattr(value, name, None), depth + 1)

    visit(optimizer.state)
    visit(list(optimizer.param_groups))
    visit(optimizer)
    return found


def bytes_per_rank(dtype):
    comm = communicator()
    params = [nn.Parameter(cases.normals((n, 100), dtype, 0, n)) for n in (1, 50, 333, 1000)]
    optimizer = fused_adam(params, lr=1e-2)
    sum(p.sum() for p in params).backward()
    optimizer.step()
    numel = sum(p.numel() for p in params)
    held = state_tensors(optimizer)
    grads = {p.grad.untyped_storage().data_ptr() for p in params}
    grads |= {p.untyped_storage().data_ptr() for p in params}
    state = sum(size for pointer, size in held.items() if pointer not in grads)
    assert comm.heap_allocated < 2 * numel * dtype.itemsize + 64 * 1024
    return state, numel


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_state_is_one_share_per_rank(on_ranks, dtype):
    for world_size in (1, 2, 4):
        for state, numel in on_ranks.run(world_size, bytes_per_rank, dtype):
            full = numel * 4 * (2 if dtype == torch.float32 else 3)
            assert 0.9 * full / world_size < state < 1.1 * full / world_size + 4096


def bert_like(width=192, layers=12, vocabulary=2000):
    """The parameter shapes of a BERT whose width is a quarter of the original's."""
    shapes = [(vocabulary, width), (512, width), (2, width), (width,), (width,)]
    for _ in range(layers):
        shapes += [(width, width), (width,)] * 4 + [(width,), (width,)] * 2
        shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return shapes


def metadata():
    with new_communicator(heap_bytes=1 << 30) as comm:
        params = [torch.zeros(shape) for shape in bert_like()]
        numel = sum(p.numel() for p in params)
        state = co.AdamState(params, group=comm)
        shared = comm.heap_allocated
        padding = 4 * (state.exp_avg.numel() - numel / comm.world_size)
        for _ in range(3):
            co.rs_adam_ag_(params, params, state, lr=1e-3)
        assert comm.heap_allocated == shared
        assert shared + padding < 0.006 * 4 * numel, (shared, padding, numel)


def test_metadata_is_below_0_6_percent_of_the_parameters(run_few):
    run_few(metadata)


def saved_parameter():
    with seeded(0):
        model = nn.Sequential(nn.Linear(10, 10), nn.Linear(1000, 1000))
    optimizer = fused_adam(model.parameters())
    for tensor, limit in ((model[0].weight, 3000), (model[0].state_dict(), 4000)):
        file = io.BytesIO()
        torch.save(tensor, file)
        assert len(file.getvalue()) < limit
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["weight"], model[0].weight)
    optimizer.step()


def test_saving_a_parameter_writes_only_that_parameter(run_pair):
    run_pair(saved_parameter)


# --- parameters that change from outside ---------------------------------------------------------


def replaced_data(dtype):
    params = odd_parameters(dtype)
    optimizer = fused_adam(params, lr=1e-2, weight_decay=0.125)
    oracle = Adam64(params)
    for step in range(10):
        if step in (3, 6):
            for index, p in enumerate(params):
                value = cases.normals(p.shape, dtype, 0, 50 * step + index)
                if step == 3:
                    p.data = value
                elif dtype == torch.float32:
                    with torch.no_grad():
                        p.copy_(value)
                else:
                    p.data = value.clone()
                oracle.params[index].data.copy_(value.double())
        own, averages = average_gradients(params, step)
        deliver_by_autograd(optimizer, params, own)
        optimizer.step()
        oracle.step(averages, lr=1e-2, weight_decay=0.125)
        check(params, oracle.params, f"step {step}")
    return digest(params)


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_replaced_data_is_taken_up(run_few, dtype):
    assert_same_on_all_ranks(run_few(replaced_data, dtype))


def replaced_by_something_else():
    for value, error in (
        (torch.ones(3), "ValueError"),
        (torch.ones(4, 2), "ValueError"),
        (torch.ones(2, 4).half(), "TypeError"),
    ):
        params = [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(2, 4))]
        optimizer = fused_adam(params)
        optimizer.step()
        if communicator().rank == 1:
            params[1].data = value
        name, message, _ = raised(optimizer.step)
        assert name == (error if communicator().rank == 1 else "MismatchError"), (name, message)
        assert "params[1]" in message or "parameter 1" in message, message


def test_data_replaced_by_another_shape_or_dtype_is_refused(run_few):
    run_few(replaced_by_something_else)


def loaded_weights():
    with seeded(1):
        model, other = nn.Linear(7, 5), nn.Linear(7, 5)
    optimizer = fused_adam(model.parameters(), lr=1e-2)
    model.load_state_dict(other.state_dict())
    oracle = Adam64(list(other.parameters()))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(7)).sum().backward()
        gradients = [p.grad.double().clone() for p in model.parameters()]
        optimizer.step()
        oracle.step(gradients, lr=1e-2)
        check(list(model.parameters()), oracle.params, "loaded weights")


def test_loaded_weights_are_taken_up(run_few):
    run_few(loaded_weights)


def changed_in_place(rehome, change):
    """Of 16-bit weights there is a master, which must follow."""
    p = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = fused_adam([p], lr=1e-3, rehome=rehome)
    p.grad = torch.ones_like(p)
    optimizer.step()
    new = torch.full((300,), 5.0, dtype=torch.bfloat16)
    if change == "data":
        p.data = new
    else:
        with torch.no_grad():
            p.copy_(new)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (p > 4.9).all(), p[:4]


@pytest.mark.parametrize("change", ["in place", "data"])
@pytest.mark.parametrize("rehome", [True, False])
def test_changed_16_bit_weights_are_taken_up(run_few, rehome, change):
    run_few(changed_in_place, rehome, change)


def broadcast():
    rank = communicator().rank
    params = [
        nn.Parameter(cases.normals(shape, torch.float32, rank, seed))
        for seed, shape in enumerate([(30, 3), (), (1134,)])
    ]
    fused_adam(params, broadcast_params=True)
    for seed, p in enumerate(params):
        assert torch.equal(p, cases.normals(p.shape, torch.float32, 0, seed))


def test_broadcast_params_takes_rank_0_s_values(run):
    run(broadcast)


def differing_among_mixed_dtypes():
    params = [
        nn.Parameter(torch.ones(5, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    ]
    if communicator().rank == 1:
        params[3].data[0] = 2
    name, message, _ = raised(lambda: fused_adam(params))
    assert name == "MismatchError", (name, message)
    assert "parameter 3 of group 0" in message, message


def test_a_differing_parameter_is_named_by_its_place_in_the_group(run_few):
    run_few(differing_among_mixed_dtypes)


def group_without_parameters():
    p = nn.Parameter(torch.ones(3))
    optimizer = fused_adam([{"params": [p]}, {"params": []}], lr=0.5)
    p.sum().backward()
    optimizer.step()
    cases.assert_close(p.detach(), torch.full((3,), 0.5), {"rtol": 1e-6, "atol": 1e-6}, "parameter")


def test_a_group_may_be_empty(run_few):
    run_few(group_without_parameters)


def differing_parameters(last):
    world = communicator().world_size
    params = odd_parameters(torch.float32)
    if communicator().rank == world - 1:
        params[4].data[2, 128 if last else 0] += 1e-3
    name, message, _ = raised(lambda: fused_adam(params))
    assert name == "MismatchError", (name, message)
    assert "parameter 4" in message or "params[4]" in message, message
    assert re.search(rf"ranks? \[?{world - 1}\b", message), message
    # The same group goes on working.
    params = odd_parameters(torch.float32)
    optimizer = fused_adam(params)
    sum(p.sum() for p in params).backward()
    optimizer.step()


@pytest.mark.parametrize("last", [False, True], ids=["an early element", "the last element"])
def test_differing_parameters_are_found_at_construction(run_few, last):
    run_few(differing_parameters, last)


def nan_parameters():
    params = [nn.Parameter(torch.tensor([1.0, float("nan"), -0.0]))]
    fused_adam(params)


def test_equal_nans_are_equal_parameters(run_pair):
    run_pair(nan_parameters)


# --- optimizer interface -------------------------------------------------------------------------


def interface():
    model = nn.Linear(4, 4)
    for p in model.parameters():
        nn.init.ones_(p)
    optimizer = fused_adam(model.parameters(), lr=0.125, betas=(0.8, 0.9), eps=1e-7)
    assert isinstance(optimizer, torch.optim.Optimizer)
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.125 and group["betas"] == (0.8, 0.9) and group["eps"] == 1e-7
    assert group["weight_decay"] == 0.0 and group["bias_correction"] is True

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4)).sum()
        assert torch.is_grad_enabled()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 20
    assert model.weight[0, 0].item() == pytest.approx(0.875)
    assert optimizer.step() is None
    steps = []
    optimizer.register_step_post_hook(lambda *arguments: steps.append(1))
    optimizer.step()
    assert steps == [1]
    assert "DistributedFusedAdam" in repr(optimizer)


def test_is_a_torch_optimizer(run_few):
    run_few(interface)


def process_group_argument():
    group = dist.new_group([1, 2])
    rank = communicator().rank
    if rank == 0:
        return None
    params = [nn.Parameter(torch.ones(100))]
    optimizer = DistributedFusedAdam(params, lr=0.1, process_group=group)
    oracle = Adam64(params)
    for step in range(5):
        optimizer.zero_grad()
        (params[0] * (rank + step)).sum().backward()
        optimizer.step()
        oracle.step([torch.full((100,), 1.5 + step, dtype=torch.float64)], lr=0.1)
        check(params, oracle.params, step)
    return digest(params)


def test_works_on_a_subgroup():
    results = values(run_fresh(3, process_group_argument))
    assert_same_on_all_ranks(results[1:])


def in_backward_of_shared_parameters():
    """A parameter used twice gets one gradient; a retained graph a second one."""
    with seeded(0):
        layer = nn.Linear(5, 5)
    twin = copy.deepcopy(layer)
    optimizer = fused_adam(layer.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        for p in twin.parameters():
            p.grad = None
        for module in (layer, twin):
            loss = module(module(torch.ones(5))).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_accumulation_equals_plain_autograd(run_pair):
    run_pair(in_backward_of_shared_parameters)


def gradient_clipping():
    with seeded(0):
        model = nn.Linear(5, 5)
    optimizer = fused_adam(model.parameters(), lr=1e-2)
    oracle = Adam64(list(model.parameters()))
    for _ in range(5):
        optimizer.zero_grad()
        (100 * model(torch.ones(5))).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradients = [p.grad.double().clone() for p in model.parameters()]
        assert sum(grad.square().sum() for grad in gradients).sqrt() < 0.51
        optimizer.step()
        oracle.step(gradients, lr=1e-2)
        check(list(model.parameters()), oracle.params, "clipped")


def test_gradients_may_be_changed_in_place_before_the_step(run_few):
    run_few(gradient_clipping)


# --- a model outlives its communicator -----------------------------------------------------------


def model_outlives():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    for p in model.parameters():
        nn.init.constant_(p, 0.25)
    optimizer = fused_adam(model.parameters(), lr=1e-2)
    inputs = torch.ones(3, 8)
    model(inputs).sum().backward()
    optimizer.step()
    expected = model(inputs).detach().clone()
    early = copy.deepcopy(model)
    communicator().close()
    assert torch.equal(model(inputs), expected)
    name, message, bases = raised(optimizer.step)
    assert "CommunicatorError" in bases, (name, message)
    dist.destroy_process_group()
    assert torch.equal(model(inputs), expected)
    late = copy.deepcopy(model)
    del optimizer
    gc.collect()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    model(inputs).sum().backward()
    del model
    gc.collect()
    for copied in (early, late):
        assert torch.equal(copied(inputs), expected)
        plain = torch.optim.AdamW(copied.parameters())
        copied(inputs).sum().backward()
        plain.step()
        assert not torch.equal(copied(inputs), expected)


def test_model_outlives_its_communicator_and_group():
    values(run_fresh(2, model_outlives))


def copied_model():
    with seeded(0):
        model = nn.Linear(8, 8)
    optimizer = fused_adam(model.parameters(), lr=1e-2)
    copied = copy.deepcopy(model)
    assert not any(
        p.data_ptr() == q.data_ptr()
        for p, q in zip(model.parameters(), copied.parameters(), strict=True)
    )
    before = digest(copied.parameters())
    copied(torch.ones(8)).sum().backward()  # has no hook of the optimizer
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    assert digest(copied.parameters()) == before
    second = fused_adam(copied.parameters(), lr=1e-2)
    second.step()
    assert digest(copied.parameters()) == digest(model.parameters())


def test_copied_model_is_independent(run_pair):
    run_pair(copied_model)


# --- a real model --------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm transformer block. No bias before the softmax: its gradient is only rounding noise,
    which Adam would blow up to full steps."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class TinyLM(nn.Module):
    def __init__(self, vocabulary=50, width=32, heads=4, layers=2, length=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.blocks(self.embedding(tokens) + self.position)
        return self.norm(x) @ self.embedding.weight.t()  # tied weights


def train(model, optimizer, steps=STEPS):
    losses = []
    for step in range(steps):
        generator = torch.Generator("cpu").manual_seed(100 * step + communicator().rank)
        start = torch.randint(50, (4, 1), generator=generator, device="cpu")
        tokens = (start.to(torch.get_default_device()) + torch.arange(17)) % 50
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_as_ddp():
    torch.manual_seed(3)
    fused, stock = TinyLM(), TinyLM()
    stock.load_state_dict(fused.state_dict())
    optimizer = fused_adam(fused.parameters(), lr=1e-3, weight_decay=0.125)
    ours = train(fused, optimizer)
    ddp = nn.parallel.DistributedDataParallel(stock)
    theirs = train(ddp, torch.optim.AdamW(stock.parameters(), lr=1e-3, weight_decay=0.125))
    assert ours[-1] < ours[0] - 0.5, "it doesn't learn"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    for (name, p), q in zip(fused.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    return digest(fused.parameters())


@pytest.mark.backends()
def test_transformer_trains_as_with_ddp_and_adamw(run_few):
    assert_same_on_all_ranks(run_few(same_as_ddp))


def trained_bits():
    digests = []
    for _ in range(2):
        with seeded(3):
            model = TinyLM()
        optimizer = fused_adam(model.parameters(), lr=1e-3)
        train(model, optimizer, 5)
        digests.append(digest(model.parameters()))
    assert digests[0] == digests[1]
    return digests


def test_training_is_deterministic(run_few):
    assert_same_on_all_ranks(run_few(trained_bits))


def half_precision_learns(dtype):
    with seeded(3):
        model = TinyLM().to(dtype)
    losses = train(model, fused_adam(model.parameters(), lr=3e-3, eps=1e-6), 40)
    assert losses[-1] < losses[0] - 0.5, losses
    return digest(model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=cases.name)
def test_transformer_in_half_precision_learns(run_pair, dtype):
    assert_same_on_all_ranks(run_pair(half_precision_learns, dtype))
