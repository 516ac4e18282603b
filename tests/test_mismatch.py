"""Ranks that call different things: MismatchError on every rank, nothing written, no harm done."""

from __future__ import annotations

import os
import re

import cases
import pytest
import torch
import torch.distributed as dist
from harness import communicator, fused_adam, raised, run_fresh, values
from torch import nn

import coconet_ops as co

pytestmark = pytest.mark.backends("local", "emulated", "cuda")


class Calls:
    """One correct call of each kind, which a case changes on one rank."""

    def __init__(self, placement="private"):
        self.comm = communicator()

        def place(values):
            return cases.placed(self.comm, values, placement)[0]

        self.x = place(torch.ones(6, 4))
        self.params = [place(torch.ones(5)), place(torch.ones(3, 3))]
        self.grads = [place(torch.ones(5)), place(torch.ones(3, 3))]
        self.state = co.AdamState(self.params, group=self.comm)

    def all_reduce(self, *x, **options):
        return co.all_reduce(*(x or (self.x,)), group=self.comm, **options)

    def all_reduce_(self, *x, **options):
        return co.all_reduce_(*(x or (self.x,)), group=self.comm, **options)

    def reduce_scatter(self, *x, **options):
        return co.reduce_scatter(*(x or (self.x,)), group=self.comm, **options)

    def all_gather(self, *x, **options):
        return co.all_gather(*(x or (self.x,)), group=self.comm, **options)

    def adam(self, **options):
        co.rs_adam_ag_(self.params, self.grads, self.state, **{"lr": 0.1, **options})

    def everything(self):
        return [self.x, *self.params, *self.grads, self.state.exp_avg, self.state.exp_avg_sq]


def half(x):
    return x.half()


# name: (call on most ranks, call on the odd rank, what the message says of each)
CASES = {
    "op": (
        lambda c: c.all_reduce(),
        lambda c: c.reduce_scatter(),
        ("all_reduce", "reduce_scatter"),
    ),
    "op against barrier": (
        lambda c: c.all_reduce(),
        lambda c: c.comm.barrier(),
        ("all_reduce", "barrier"),
    ),
    "op against step": (
        lambda c: c.all_gather(),
        lambda c: c.adam(),
        ("all_gather", "rs_adam_ag_"),
    ),
    "shape": (
        lambda c: c.all_reduce(),
        lambda c: c.all_reduce(torch.ones(6, 5)),
        (r"6, 4", r"6, 5"),
    ),
    "same size, another shape": (
        lambda c: c.all_reduce_(),
        lambda c: c.all_reduce_(c.x.view(4, 6)),
        (r"6, 4", r"4, 6"),
    ),
    "number of dimensions": (
        lambda c: c.all_reduce(),
        lambda c: c.all_reduce(torch.ones(24)),
        (r"6, 4", r"24"),
    ),
    "dtype": (
        lambda c: c.all_reduce(),
        lambda c: c.all_reduce(half(c.x)),
        ("float32", "float16"),
    ),
    "sum and avg": (
        lambda c: c.all_reduce(),
        lambda c: c.all_reduce(op="avg"),
        ("sum", "avg"),
    ),
    "in place and out of place": (
        lambda c: c.all_reduce_(),
        lambda c: c.all_reduce(),
        ("True", "False"),
    ),
    "dim of reduce_scatter": (
        lambda c: c.reduce_scatter(dim=0),
        lambda c: c.reduce_scatter(dim=1),
        (r"dim\b.*\b0\b", r"dim\b.*\b1\b"),
    ),
    "split": (
        lambda c: c.reduce_scatter(),
        lambda c: c.reduce_scatter(split="chunk"),
        ("tensor_split", "chunk"),
    ),
    "op of reduce_scatter": (
        lambda c: c.reduce_scatter(),
        lambda c: c.reduce_scatter(op="avg"),
        ("sum", "avg"),
    ),
    "dim of all_gather": (
        lambda c: c.all_gather(dim=0),
        lambda c: c.all_gather(dim=1),
        (r"dim\b.*\b0\b", r"dim\b.*\b1\b"),
    ),
    "other dimensions of all_gather": (
        lambda c: c.all_gather(),
        lambda c: c.all_gather(torch.ones(6, 3)),
        (r"\b4\b", r"\b3\b"),
    ),
    "dtype of all_gather": (
        lambda c: c.all_gather(c.x.long()),
        lambda c: c.all_gather(c.x.double()),
        ("int64", "float64"),
    ),
    "dtype of all_gather that has no short name": (
        lambda c: c.all_gather(c.x.to(torch.float8_e4m3fn)),
        lambda c: c.all_gather(c.x.to(torch.float8_e5m2)),
        ("(?i)float8_e4m3fn", "(?i)float8_e5m2"),
    ),
    "size of all_gather": (
        lambda c: c.all_gather(size=6 * c.comm.world_size),
        lambda c: c.all_gather(),
        (r"\d+", r"\d+"),
    ),
    "lr": (lambda c: c.adam(), lambda c: c.adam(lr=0.2), (r"0\.1", r"0\.2")),
    "betas": (
        lambda c: c.adam(betas=(0.5, 0.9)),
        lambda c: c.adam(betas=(0.5, 0.8)),
        (r"beta2.*0\.9", r"beta2.*0\.8"),
    ),
    "eps": (lambda c: c.adam(), lambda c: c.adam(eps=0.25), ("eps", r"0\.25")),
    "weight_decay": (
        lambda c: c.adam(),
        lambda c: c.adam(weight_decay=0.25),
        ("weight_decay", r"0\.25"),
    ),
    "adam_w_mode": (lambda c: c.adam(), lambda c: c.adam(adam_w_mode=False), ("True", "False")),
    "bias_correction": (
        lambda c: c.adam(),
        lambda c: c.adam(bias_correction=False),
        ("True", "False"),
    ),
    "average_grads": (
        lambda c: c.adam(),
        lambda c: c.adam(average_grads=False),
        ("True", "False"),
    ),
    "size of a heap tensor": (
        lambda c: c.comm.empty(1000),
        lambda c: c.comm.empty(2000),
        ("4000|1000", "8000|2000"),
    ),
    "number of parameters": (
        lambda c: new_state_and_step(c, [torch.ones(3)]),
        lambda c: new_state_and_step(c, [torch.ones(3), torch.ones(3)]),
        (r"param.*\b1\b", r"param.*\b2\b"),
    ),
    "sizes of parameters": (
        lambda c: new_state_and_step(c, [torch.ones(3), torch.ones(40)]),
        lambda c: new_state_and_step(c, [torch.ones(3), torch.ones(41)]),
        (r"param.*\b40\b", r"param.*\b41\b"),
    ),
    "sizes of parameters, far apart": (
        lambda c: new_state_and_step(c, [torch.ones(3), torch.ones(40)]),
        lambda c: new_state_and_step(c, [torch.ones(100_000), torch.ones(40)]),
        (r"param.*\b3\b", r"param.*\b100000\b"),
    ),
    "dtype of parameters": (
        lambda c: new_state_and_step(c, [torch.ones(3)]),
        lambda c: new_state_and_step(c, [half(torch.ones(3))]),
        ("float32", "float16"),
    ),
    "number of the optimizer's parameters": (
        lambda c: optimizer([(3,), (4,)]),
        lambda c: optimizer([(3,), (4,), (5,)]),
        (r"param.*\b2\b", r"param.*\b3\b"),
    ),
    "size of the optimizer's parameters": (
        lambda c: optimizer([(3,), (4,)]),
        lambda c: optimizer([(3,), (5,)]),
        (r"params\[1\].*\b4\b", r"params\[1\].*\b5\b"),
    ),
    "shape of the optimizer's parameters": (
        lambda c: optimizer([(3,), (4, 2)]),
        lambda c: optimizer([(3,), (2, 4)]),
        (r"params\[1\].*\b4, 2\b", r"params\[1\].*\b2, 4\b"),
    ),
}


def new_state_and_step(calls, params):
    state = co.AdamState(params, group=calls.comm)
    co.rs_adam_ag_(params, [torch.ones_like(p) for p in params], state, lr=0.1)


def optimizer(shapes):
    return fused_adam([nn.Parameter(torch.ones(shape)) for shape in shapes], lr=0.1)


def disagree(case, placement, odd):
    usual, unusual, _ = CASES[case]
    calls = Calls(placement)
    before = [cases.bits(x) for x in calls.everything()]
    call = unusual if calls.comm.rank == odd else usual
    name, message, bases = raised(lambda: call(calls))
    assert [cases.bits(x) for x in calls.everything()] == before, "something was written"
    # The communicator goes on working.
    world = calls.comm.world_size
    assert not calls.comm.closed
    assert torch.equal(calls.all_reduce(), torch.full((6, 4), float(world)))
    calls.adam()
    expected = torch.full((5,), 0.9)
    cases.assert_close(calls.params[0], expected, cases.OPTIMIZER_TOLERANCE, "after the mismatch")
    return name, message, bases


@pytest.mark.parametrize("placement", ["private", "heap"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_disagree_are_told_who_has_what(on_ranks, case, placement):
    for world_size, odd in ((2, 1), (3, 0)):
        results = on_ranks.run(world_size, disagree, case, placement, odd)
        _, _, (usual, unusual) = CASES[case]
        for name, message, bases in results:
            assert name == "MismatchError" and "CommunicatorError" in bases, (name, message)
            assert re.search(usual, message) and re.search(unusual, message), message
            for rank in range(world_size):
                assert re.search(rf"\branks? [\d, ]*\b{rank}\b", message), message


def lists_disagree(changed, placement):
    """The ranks' lists of gradients or parameters differ in one tensor."""
    comm = communicator()
    shapes = [(5,), (3, 3), (130,)]
    params = [cases.placed(comm, torch.ones(shape), placement)[0] for shape in shapes]
    grads = [cases.placed(comm, torch.ones(shape), placement)[0] for shape in shapes]
    state = co.AdamState(params, group=comm)
    if comm.rank == 1:
        changed(params, grads)
    before = [cases.bits(p) for p in params]
    name, message, bases = raised(lambda: co.rs_adam_ag_(params, grads, state, lr=0.1))
    assert [cases.bits(p) for p in params] == before
    assert (co.all_reduce(torch.ones(4), group=comm) == comm.world_size).all()
    return name, message


def fewer(params, grads):
    params.pop()
    grads.pop()


def another_size(params, grads):
    params[1], grads[1] = torch.ones(3, 4), torch.ones(3, 4)


def another_dtype(params, grads):
    params[:] = [p.bfloat16() for p in params]
    grads[:] = [grad.bfloat16() for grad in grads]


@pytest.mark.parametrize("changed", [fewer, another_size, another_dtype])
@pytest.mark.parametrize("placement", ["private", "heap"])
def test_lists_that_do_not_match_the_state_or_the_peers(run_few, changed, placement):
    results = run_few(lists_disagree, changed, placement)
    assert results[1][0] in ("TypeError", "ValueError"), results[1]
    for rank, (name, message) in enumerate(results):
        if rank != 1:
            assert name == "MismatchError" and "rank 1" in message, (name, message)


def stepwise(placement):
    """Ranks that disagree in every second call, many times over: nothing gets out of step."""
    calls = Calls(placement)
    world = calls.comm.world_size
    for step in range(40):
        odd = calls.comm.rank == step % world
        with pytest.raises(co.MismatchError):
            calls.all_reduce(op="avg" if odd else "sum")
        value = float(step + calls.comm.rank)
        x = calls.all_reduce(torch.full((50 * step,), value))
        assert (x == step * world + world * (world - 1) / 2).all(), step
        with pytest.raises(co.MismatchError if not odd else TypeError):
            calls.all_reduce(torch.ones(4, dtype=torch.int16) if odd else torch.ones(4))
        if step % 3 == 0:
            heap = calls.comm.empty(100 + step).fill_(value)
            x = calls.all_reduce(heap)
            assert (x == step * world + world * (world - 1) / 2).all(), step


@pytest.mark.parametrize("placement", ["private", "heap"])
def test_any_number_of_disagreements_does_no_harm(run, placement):
    if run.world_size > 1:
        run(stepwise, placement)


def unchecked():
    comm = communicator()
    digests = []
    for placement in cases.PLACEMENTS:
        x, _ = cases.placed(comm, torch.full((1000,), float(comm.rank)), placement)
        total = comm.world_size * (comm.world_size - 1) / 2
        assert (co.all_reduce(x, group=comm) == total).all()
        assert (co.reduce_scatter(x, group=comm) == total).all()
        assert len(co.all_gather(x[: comm.rank], group=comm)) == total
        calls = Calls(placement)
        calls.adam()
        digests.append(cases.digest(calls.params[1]))
    # One rank's bad input still reaches all.
    bad = torch.ones(3, dtype=torch.int16 if comm.rank == 1 else torch.float32)
    name, message, _ = raised(lambda: co.all_reduce(bad, group=comm))
    assert name == ("TypeError" if comm.rank == 1 else "MismatchError"), (name, message)
    return digests


def checked_here_only(odd):
    os.environ["COCONET_CHECK"] = "0" if dist.get_rank() == odd else "1"
    refused = raised(lambda: co.Communicator(heap_bytes=1 << 20))
    os.environ["COCONET_CHECK"] = "1"
    with co.Communicator(heap_bytes=1 << 20) as comm:
        comm.barrier()
    return refused


def test_ranks_that_differ_in_whether_they_check_get_no_communicator():
    """One would go on where the others stop, and wait for them in vain."""
    results = values(run_fresh(3, checked_here_only, 1))
    for name, message, _ in results:
        assert name == "CommunicatorError" and "COCONET_CHECK" in message, (name, message)
        assert "ranks [0, 2]" in message and "ranks [1]" in message, message


def test_correct_calls_work_without_checks():
    results = values(run_fresh(3, unchecked, environment={"COCONET_CHECK": "0"}))
    assert len({digest for digests in results for digest in digests}) == 1


def far_down_in_the_shape():
    comm = communicator()
    shape = [1] * 40 + ([3, 2] if comm.rank == 1 else [2, 3])
    name, message, _ = raised(lambda: co.reduce_scatter(torch.ones(shape), dim=41, group=comm))
    assert name == "MismatchError" and "shape" in message, (name, message)
    assert (co.all_reduce(torch.ones(3), group=comm) == comm.world_size).all()


def test_the_last_of_many_dimensions_counts(run_few):
    run_few(far_down_in_the_shape)
