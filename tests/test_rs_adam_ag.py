"""rs_adam_ag_: reduce the gradients, step Adam on the own slice, spread the new parameters."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import DTYPES, OPTIMIZER_TOLERANCE, PLACEMENTS, TOLERANCE, Adam64
from harness import assert_same_on_all_ranks, communicator, gather_objects

import coconet_ops as co

pytestmark = pytest.mark.backends("local", "emulated", "cuda")

STEPS = 25
SHAPES = ((3, 5, 7), (), (0,), (1134,), (129, 3), (1,), (1023, 7), (64,), (2, 3, 4, 5))

# Decay by a power of two is exact: where it cancels a gradient, nothing is left but zero.
HYPERPARAMETERS = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.125},
    "adam with L2": {"lr": 1e-2, "weight_decay": 0.125, "adam_w_mode": False},
    "no decay": {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6},
    "adamw, no bias correction": {"lr": 1e-2, "weight_decay": 0.125, "bias_correction": False},
    "adam, no bias correction": {
        "lr": 1e-2,
        "weight_decay": 0.125,
        "bias_correction": False,
        "adam_w_mode": False,
    },
    "sum of gradients": {"lr": 1e-2, "average_grads": False},
    "large eps": {"lr": 1e-1, "eps": 1.0, "betas": (0.0, 0.5)},
}


class Run:
    """Parameters, gradients and state on this rank, with the oracle beside them."""

    def __init__(self, dtype, placement, layout="contiguous", shapes=SHAPES, **hyper):
        self.comm = communicator()
        self.dtype, self.shapes, self.hyper = dtype, shapes, hyper
        start = [cases.normals(shape, dtype, 0, seed) for seed, shape in enumerate(shapes)]

        def place(values):
            fitting = list(cases.layouts(values.shape))
            most = max(cases.room(values.shape, other) for other in fitting)
            own = layout if layout in fitting else "contiguous"
            return cases.placed(self.comm, values, placement, own, most)

        self.params, self.buffers = zip(*map(place, start), strict=True)
        self.grads, self.grad_buffers = zip(*map(place, start), strict=True)
        self.state = co.AdamState(self.params, group=self.comm)
        flags = {key: hyper.get(key, True) for key in ("adam_w_mode", "bias_correction")}
        self.oracle = Adam64(start, **flags)
        self.count = 0

    def step(self, absent=lambda rank, index: False, **changes):
        """One step; absent(rank, index): that gradient is None on that rank."""
        world = self.comm.world_size
        hyper = {**self.hyper, **changes}
        self.count += 1
        grads, averages = [], []
        for index, shape in enumerate(self.shapes):
            seed = 100 * self.count + index
            present = [rank for rank in range(world) if not absent(rank, index)]
            by_rank = {rank: cases.gradient(shape, self.dtype, rank, seed) for rank in present}
            own = by_rank.get(self.comm.rank)
            grads.append(None if own is None else self.grads[index].copy_(own))
            total = cases.reduced(list(by_rank.values())) if present else None
            if total is not None and hyper.get("average_grads", True):
                total = total / world
            averages.append(total)
        names = ("lr", "betas", "eps", "weight_decay")
        self.oracle.step(averages, **{key: hyper[key] for key in names if key in hyper})
        result = co.rs_adam_ag_(self.params, grads, self.state, group=self.comm, **hyper)
        assert result is None

    def check(self):
        # A low-precision parameter is its fp32 master, rounded once.
        tolerance = {
            key: OPTIMIZER_TOLERANCE[key]
            + (TOLERANCE[self.dtype][key] if self.dtype != torch.float32 else 0)
            for key in ("rtol", "atol")
        }
        for index, (p, expected) in enumerate(zip(self.params, self.oracle.params, strict=True)):
            cases.assert_close(p, expected, tolerance, f"parameter {index} after {self.count}")

    def digest(self):
        return [cases.digest(p) for p in self.params]


def against_torch_optim(dtype, placement, hyper):
    run = Run(dtype, placement, **hyper)
    digests = []
    for _ in range(STEPS):
        run.step()
        run.check()
        digests.append(run.digest())
    assert [int(step) for step in run.state.steps] == [STEPS] * len(SHAPES)
    return digests


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_follows_torch_optim_in_float64(run, dtype, placement):
    hyper = HYPERPARAMETERS["adamw"]
    assert_same_on_all_ranks(run(against_torch_optim, dtype, placement, hyper))


@pytest.mark.backends("emulated", "cuda")
@pytest.mark.parametrize("hyper", HYPERPARAMETERS.values(), ids=HYPERPARAMETERS)
@pytest.mark.parametrize("placement", ["private", "heap"])
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_follows_torch_optim_for_any_hyperparameters(run_pair, dtype, placement, hyper):
    assert_same_on_all_ranks(run_pair(against_torch_optim, dtype, placement, hyper))


def bits_by_placement(dtype):
    digests = []
    for placement, layout in (
        *((placement, "contiguous") for placement in PLACEMENTS),
        *(("private", layout) for layout in cases.LAYOUTS),
        *(("heap", layout) for layout in cases.LAYOUTS),
        ("heap", "contiguous"),
    ):
        run = Run(dtype, placement, layout, lr=1e-2, weight_decay=0.125)
        for _ in range(5):
            run.step()
        run.check()
        digests.append(run.digest())
    assert all(digest == digests[0] for digest in digests), digests
    return digests


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_bits_do_not_depend_on_rank_run_placement_or_layout(run, dtype):
    assert_same_on_all_ranks(run(bits_by_placement, dtype))


def layout_by_rank(dtype, placement):
    rank = communicator().rank
    run = Run(dtype, placement, cases.LAYOUTS[rank % len(cases.LAYOUTS)], lr=1e-2)
    # Gradients have another layout than their parameters.
    other = Run(dtype, placement, cases.LAYOUTS[(2 * rank + 1) % len(cases.LAYOUTS)])
    run.grads = other.grads
    for _ in range(5):
        run.step()
        run.check()
    return run.digest()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_layouts_may_differ_between_ranks_and_tensors(run, dtype, placement):
    assert_same_on_all_ranks(run(layout_by_rank, dtype, placement))


def beside_the_tensors(dtype, placement, layout):
    run = Run(dtype, placement, layout, lr=1e-2)
    before = [buffer.clone() for buffer in run.buffers]
    run.step()
    for old, p, buffer in zip(before, run.params, run.buffers, strict=True):
        # With the new values in the old surroundings, nothing may differ.
        torch.as_strided(old, p.shape, p.stride(), p.storage_offset()).copy_(p)
        assert cases.bits(old) == cases.bits(buffer)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("placement", ["private", "heap"])
def test_nothing_beside_the_parameters_is_written(run_few, placement, layout):
    run_few(beside_the_tensors, torch.float32, placement, layout)


def gradients_stay(placement):
    run = Run(torch.float32, placement, lr=1e-2)
    run.step()
    for index, grad in enumerate(run.grads):
        own = cases.gradient(run.shapes[index], run.dtype, run.comm.rank, 100 * run.count + index)
        assert torch.equal(grad, own), index


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_are_not_changed(run_few, placement):
    run_few(gradients_stay, placement)


def masters(dtype, placement):
    run = Run(dtype, placement, lr=1e-2, weight_decay=0.125)
    for _ in range(STEPS):
        run.step()
    slices = gather_objects(run.state.master.clone())
    assert all(part.dtype == torch.float32 and part.dim() == 1 for part in slices)
    flat = torch.cat(slices)
    expected = cases.flat_list(run.oracle.params, len(flat))
    real = ~expected.isnan()
    cases.assert_close(flat[real], expected[real], OPTIMIZER_TOLERANCE, "masters")
    params = cases.flat_list(run.params, len(flat))
    cases.assert_exact(params[real], flat.to(dtype)[real], "parameter is the rounded master")


@pytest.mark.parametrize("placement", ["private", "heap"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=cases.name)
def test_masters_follow_float64_and_parameters_are_rounded_masters(run, dtype, placement):
    run(masters, dtype, placement)


def missing_on_some(dtype, placement):
    run = Run(dtype, placement, lr=1e-2, weight_decay=0.125)
    world = run.comm.world_size
    for step in range(STEPS):
        # Some rank has a gradient of every parameter, so absence counts as zero.
        run.step(lambda rank, index, step=step: world > 1 and (step + index + rank) % world == 0)
        run.check()
    return run.digest()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_gradient_missing_on_some_ranks_counts_as_zero(run_few, dtype, placement):
    assert_same_on_all_ranks(run_few(missing_on_some, dtype, placement))


def missing_on_all(dtype, placement):
    run = Run(dtype, placement, lr=1e-2, weight_decay=0.125)
    expected = [0] * len(SHAPES)
    for step in range(STEPS):
        before = run.digest()

        def skipped(rank, index, step=step):
            return (index + step) % 3 == 0

        run.step(skipped)
        run.check()
        for index, (old, new) in enumerate(zip(before, run.digest(), strict=True)):
            if skipped(0, index):
                assert old == new, f"parameter {index} without gradient changed"
            else:
                expected[index] += 1
    assert [int(count) for count in run.state.steps] == expected
    before = run.digest()
    run.step(lambda rank, index: True)
    assert run.digest() == before
    assert [int(count) for count in run.state.steps] == expected


@pytest.mark.parametrize("placement", ["private", "heap"])
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_parameter_without_any_gradient_is_left_alone(run_few, dtype, placement):
    run_few(missing_on_all, dtype, placement)


def steps_around_rejected_calls():
    """A rejected call waits for nobody: its rank runs ahead of peers that are still in a step."""
    comm = communicator()
    params = [torch.zeros(20) for _ in range(200)]
    state = co.AdamState(params, group=comm)
    counts = [0] * len(params)
    for step in range(80):
        present = [(index + step // 2) % 2 == 0 for index in range(len(params))]
        counts = [count + here for count, here in zip(counts, present, strict=True)]
        grads = [torch.ones(20) if here else None for here in present]
        co.rs_adam_ag_(params, grads, state, lr=2**-10)
        bad = comm.rank == step % comm.world_size
        with pytest.raises(TypeError if bad else co.MismatchError):
            dtype = torch.int16 if bad else torch.float32
            co.all_reduce(torch.ones(3, dtype=dtype), group=comm)
    assert state.steps == counts
    for p, count in zip(params, counts, strict=True):
        # Under a constant gradient Adam goes by lr, step by step.
        expected = torch.full((20,), -count * 2.0**-10)
        cases.assert_close(p, expected, {"rtol": 1e-4, "atol": 0}, "parameter")
    return [cases.digest(p) for p in params]


def test_steps_do_not_get_mixed_up_by_rejected_calls(run_few):
    assert_same_on_all_ranks(run_few(steps_around_rejected_calls))


def changing_hyperparameters():
    run = Run(torch.float32, "heap", lr=0.0)
    for step in range(STEPS):
        run.step(lr=1e-2 / (step + 1), betas=(0.9, 0.99 + step / 10000), weight_decay=step / 100)
        run.check()


def test_hyperparameters_may_change_from_step_to_step(run_few):
    run_few(changing_hyperparameters)


def zero_learning_rate(dtype):
    run = Run(dtype, "heap", lr=0.0)
    before = run.digest()
    for _ in range(3):
        run.step()
    assert run.digest() == before


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_zero_learning_rate_keeps_every_bit(run_few, dtype):
    run_few(zero_learning_rate, dtype)


def large(dtype, placement):
    shapes = ((cases.LARGER_THAN_STAGING // 3,), (1000, 701), (7,))
    run = Run(dtype, placement, shapes=shapes, lr=1e-2, weight_decay=0.125)
    for _ in range(3):
        run.step()
    run.check()
    return run.digest()


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_tensors_larger_than_the_staging_chunks(run_few, dtype, placement):
    assert_same_on_all_ranks(run_few(large, dtype, placement))


def state_size(dtype):
    run = Run(dtype, "heap", shapes=((100_000,), (333, 333), (5,)), lr=1e-2)
    run.step()
    state = run.state
    parts = [state.exp_avg, state.exp_avg_sq]
    if dtype != torch.float32:
        parts.append(state.master)
    for part in parts:
        assert part.dtype == torch.float32 and part.dim() == 1
        assert part.untyped_storage().nbytes() == part.nbytes
    return [part.numel() for part in parts], sum(p.numel() for p in run.params)


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_state_exists_for_the_own_slice_only(run, dtype):
    for sizes, numel in run(state_size, dtype):
        for size in sizes:
            assert size <= numel / run.world_size + 256, "more than one rank's share"
    assert sum(sizes[0] for sizes, _ in run(state_size, dtype)) >= numel


def other_default_dtype():
    """State is fp32 whatever the default."""
    params = [torch.zeros(300, dtype=torch.bfloat16)]
    torch.set_default_dtype(torch.float64)
    try:
        state = co.AdamState(params, group=communicator())
        co.rs_adam_ag_(params, [torch.ones_like(params[0])], state, lr=0.5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert state.exp_avg.dtype == state.exp_avg_sq.dtype == state.master.dtype == torch.float32
    assert (params[0] == -0.5).all()


@pytest.mark.backends()  # the default is the process's
def test_default_dtype_of_torch_does_not_matter(run_pair):
    run_pair(other_default_dtype)


def many_tensors():
    shapes = [(index % 97,) for index in range(500)]
    run = Run(torch.float32, "private", shapes=shapes, lr=1e-2)
    for _ in range(3):
        run.step()
        run.check()
    return run.digest()


def test_hundreds_of_small_tensors(run_few):
    assert_same_on_all_ranks(run_few(many_tensors))


def two_states():
    first, second = (Run(torch.float32, "heap", lr=lr) for lr in (1e-2, 1e-3))
    for _ in range(5):
        first.step()
        second.step(weight_decay=0.125)
    first.check()
    second.check()


def test_states_are_independent(run_few):
    run_few(two_states)


def negated_gradient():
    params = [torch.zeros(300), torch.zeros(4, 3)]
    lazily = [torch._neg_view(torch.ones(p.shape)) for p in params]
    assert all(grad.is_neg() for grad in lazily)
    state = co.AdamState(params, group=communicator())
    co.rs_adam_ag_(params, lazily, state, lr=0.5)
    for p in params:
        cases.assert_close(p, torch.full(p.shape, 0.5), OPTIMIZER_TOLERANCE, "parameter")


def test_lazily_negated_gradients(run_few):
    run_few(negated_gradient)


def infinite_gradients(dtype, placement):
    run = Run(dtype, placement, shapes=((200,),), lr=1e-2)
    run.grads[0].fill_(1)
    if run.comm.rank == 0:
        run.grads[0][3] = float("inf")
        run.grads[0][150] = float("nan")
    co.rs_adam_ag_(run.params, run.grads, run.state, lr=1e-2, group=run.comm)
    bad = ~run.params[0].isfinite()
    assert bad.nonzero().flatten().tolist() == [3, 150]


@pytest.mark.parametrize("placement", ["private", "heap"])
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_infinite_gradients_spoil_their_own_elements_only(run_few, dtype, placement):
    run_few(infinite_gradients, dtype, placement)
