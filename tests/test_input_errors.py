"""Bad input: a TypeError or ValueError that names op, tensor, value and rule on the rank that has
it, a MismatchError that quotes it on the others; nothing is written."""

from __future__ import annotations

import re
from datetime import timedelta

import cases
import pytest
import torch
import torch.distributed as dist
from harness import communicator, fused_adam, new_communicator, raised
from test_mismatch import Calls
from torch import nn

import coconet_ops as co

EVERYWHERE = pytest.mark.backends("local", "emulated")
NAN = float("nan")


def sparse():
    return torch.eye(3).to_sparse()


def inference_tensor():
    with torch.inference_mode():
        return torch.ones(3)


def step(calls, params=None, grads=None, **options):
    params = calls.params if params is None else params
    grads = calls.grads if grads is None else grads
    co.rs_adam_ag_(params, grads, calls.state, **{"lr": 0.1, **options})


def leaf(*shape, **options):
    return nn.Parameter(torch.ones(*shape, **options))


def every_collective(name, make, error, words):
    """The same bad tensor given to all three collectives that compute, and in place."""
    return {
        f"{op}: {name}": (
            lambda c, op=op: getattr(c, op)(make()),
            error,
            (*words, "all_reduce" if op == "all_reduce_" else op),
        )
        for op in ("all_reduce", "all_reduce_", "reduce_scatter")
    }


# name: (call, error, what the message says)
CASES = {
    **{
        f"{op}: average of integers": (
            lambda c, op=op: getattr(c, op)(torch.ones(3, dtype=torch.int64), op="avg"),
            TypeError,
            (op, "avg", "int64", "summed"),
        )
        for op in ("all_reduce", "all_reduce_", "reduce_scatter")
    },
    **every_collective(
        "int16", lambda: torch.ones(3, dtype=torch.int16), TypeError, ("int16", "float32")
    ),
    **every_collective("uint8", lambda: torch.ones(3, dtype=torch.uint8), TypeError, ("uint8",)),
    **every_collective("bool", lambda: torch.ones(3, dtype=torch.bool), TypeError, ("bool",)),
    **every_collective(
        "complex", lambda: torch.ones(3, dtype=torch.complex64), TypeError, ("complex64",)
    ),
    **every_collective("sparse", sparse, TypeError, ("sparse|strided",)),
    **every_collective(
        "another device", lambda: torch.ones(3, device="meta"), ValueError, ("meta", "cpu")
    ),
    **every_collective("a list", lambda: [1.0, 2.0], TypeError, ("list",)),
    **every_collective("None", lambda: None, TypeError, ("None",)),
    "all_reduce: op": (lambda c: c.all_reduce(op="max"), ValueError, ("max", "sum", "avg")),
    "all_reduce_: op": (lambda c: c.all_reduce_(op="mean"), ValueError, ("mean", "sum", "avg")),
    "all_reduce_: inference tensor": (
        lambda c: c.all_reduce_(inference_tensor()),
        RuntimeError,
        ("x", "inference"),
    ),
    "reduce_scatter: op": (lambda c: c.reduce_scatter(op=""), ValueError, ("sum", "avg")),
    "reduce_scatter: split": (
        lambda c: c.reduce_scatter(split="even"),
        ValueError,
        ("even", "tensor_split", "chunk"),
    ),
    "reduce_scatter: dim": (lambda c: c.reduce_scatter(dim=2), ValueError, ("dim", r"\b2\b")),
    "reduce_scatter: negative dim": (
        lambda c: c.reduce_scatter(dim=-3),
        ValueError,
        ("dim", "-3"),
    ),
    "reduce_scatter: no dimension": (
        lambda c: c.reduce_scatter(torch.tensor(1.0)),
        ValueError,
        ("dim",),
    ),
    "all_gather: dim": (lambda c: c.all_gather(dim=2), ValueError, ("dim", r"\b2\b")),
    "all_gather: no dimension": (lambda c: c.all_gather(torch.tensor(1)), ValueError, ("dim",)),
    "all_gather: sparse": (lambda c: c.all_gather(sparse()), TypeError, ("sparse|strided",)),
    "all_gather: another device": (
        lambda c: c.all_gather(torch.ones(3, device="meta")),
        ValueError,
        ("meta",),
    ),
    "all_gather: None": (lambda c: c.all_gather([1]), TypeError, ("list",)),
    "all_gather: negative size": (lambda c: c.all_gather(size=-5), ValueError, ("size", "-5")),
    "empty: negative size": (lambda c: c.comm.empty(-3), (ValueError, RuntimeError), ("-3",)),
    "empty: more bytes than an integer holds": (
        lambda c: c.comm.empty(2**62),
        ValueError,
        ("size", str(2**62)),
    ),
    "empty: more elements than an integer holds": (
        lambda c: c.comm.empty(2**40, 2**40),
        ValueError,
        ("size", str(2**40)),
    ),
    "empty: a size that no integer holds": (
        lambda c: c.comm.empty(0, 2**63),
        ValueError,
        ("size", str(2**63)),
    ),
    "all_gather: a size that no integer holds": (
        lambda c: c.all_gather(size=2**64),
        ValueError,
        ("size", str(2**64)),
    ),
    "all_gather: quantized": (
        lambda c: c.all_gather(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)),
        TypeError,
        ("x", "quantized"),
    ),
    "all_gather: nested": (
        lambda c: c.all_gather(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        TypeError,
        ("x", "nested"),
    ),
    "empty: a float": (lambda c: c.comm.empty(4 / 2), ValueError, ("size", r"2\.0")),
    "empty: None": (lambda c: c.comm.empty(None), ValueError, ("size", "None")),
    "empty: a tensor": (lambda c: c.comm.empty(torch.tensor(3)), ValueError, ("size", "tensor")),
    "empty: Python's float as dtype": (
        lambda c: c.comm.empty(3, dtype=float),
        TypeError,
        ("dtype", "float"),
    ),
    "empty: device": (lambda c: c.comm.empty(3, device="meta"), ValueError, ("meta",)),
    "rs_adam_ag_: lr < 0": (lambda c: step(c, lr=-1e-3), ValueError, ("lr", r"-0\.001")),
    "rs_adam_ag_: lr nan": (lambda c: step(c, lr=NAN), ValueError, ("lr", "nan")),
    "rs_adam_ag_: lr inf": (lambda c: step(c, lr=float("inf")), ValueError, ("lr", "inf")),
    "rs_adam_ag_: beta1 = 1": (lambda c: step(c, betas=(1.0, 0.9)), ValueError, ("beta", "1")),
    "rs_adam_ag_: beta2 > 1": (
        lambda c: step(c, betas=(0.9, 1.5)),
        ValueError,
        ("beta", r"1\.5"),
    ),
    "rs_adam_ag_: beta1 < 0": (
        lambda c: step(c, betas=(-0.25, 0.9)),
        ValueError,
        ("beta", r"-0\.25"),
    ),
    "rs_adam_ag_: beta2 nan": (lambda c: step(c, betas=(0.9, NAN)), ValueError, ("beta", "nan")),
    "rs_adam_ag_: one beta": (lambda c: step(c, betas=(0.9,)), TypeError, ("betas", "two")),
    "rs_adam_ag_: betas as a dict": (
        lambda c: step(c, betas={"beta1": 0.9, "beta2": 0.99}),
        TypeError,
        ("betas", "two"),
    ),
    "rs_adam_ag_: lr that no float holds": (
        lambda c: step(c, lr=10**400),
        OverflowError,
        ("float",),
    ),
    "rs_adam_ag_: eps < 0": (lambda c: step(c, eps=-1.0), ValueError, ("eps", "-1")),
    "rs_adam_ag_: eps nan": (lambda c: step(c, eps=NAN), ValueError, ("eps", "nan")),
    "rs_adam_ag_: weight_decay < 0": (
        lambda c: step(c, weight_decay=-0.5),
        ValueError,
        ("weight_decay", r"-0\.5"),
    ),
    "rs_adam_ag_: weight_decay nan": (
        lambda c: step(c, weight_decay=NAN),
        ValueError,
        ("weight_decay", "nan"),
    ),
    "rs_adam_ag_: gradient of another shape": (
        lambda c: step(c, grads=[c.grads[0], torch.ones(3, 2)]),
        ValueError,
        ("grad", r"\b1\b", "3, 2", "3, 3"),
    ),
    "rs_adam_ag_: gradient of another dtype": (
        lambda c: step(c, grads=[c.grads[0], torch.ones(3, 3).half()]),
        TypeError,
        ("grad", r"\b1\b", "float16", "float32"),
    ),
    "rs_adam_ag_: sparse gradient": (
        lambda c: step(c, grads=[c.grads[0], sparse()]),
        TypeError,
        ("grad", r"\b1\b", "sparse|strided"),
    ),
    "rs_adam_ag_: gradient on another device": (
        lambda c: step(c, grads=[c.grads[0], torch.ones(3, 3, device="meta")]),
        ValueError,
        ("grad", r"\b1\b", "meta"),
    ),
    "rs_adam_ag_: fewer gradients": (
        lambda c: step(c, grads=c.grads[:1]),
        ValueError,
        ("grads", r"\b1\b", r"\b2\b"),
    ),
    "rs_adam_ag_: parameter of another size": (
        lambda c: step(
            c, params=[c.params[0], torch.ones(4, 3)], grads=[c.grads[0], torch.ones(4, 3)]
        ),
        ValueError,
        ("param", r"\b1\b"),
    ),
    "rs_adam_ag_: parameters of two dtypes": (
        lambda c: step(
            c, params=[c.params[0], c.params[1].half()], grads=[c.grads[0], c.grads[1].half()]
        ),
        TypeError,
        ("param", r"\b1\b", "float16", "float32"),
    ),
    "rs_adam_ag_: integer parameter": (
        lambda c: step(
            c, params=[c.params[0], c.params[1].int()], grads=[c.grads[0], c.grads[1].int()]
        ),
        TypeError,
        ("param", r"\b1\b", "int32"),
    ),
    "rs_adam_ag_: parameter that overlaps itself": (
        lambda c: step(c, params=[c.params[0], torch.ones(3).expand(3, 3)]),
        (TypeError, ValueError),
        ("param", r"\b1\b"),
    ),
    "AdamState: no parameters": (
        lambda c: co.AdamState([], group=c.comm),
        ValueError,
        ("param",),
    ),
    "AdamState: None": (lambda c: co.AdamState(None, group=c.comm), TypeError, ("None",)),
    "AdamState: integer parameter": (
        lambda c: co.AdamState([torch.ones(3, dtype=torch.int64)], group=c.comm),
        TypeError,
        ("int64",),
    ),
    "AdamState: two dtypes": (
        lambda c: co.AdamState([torch.ones(3), torch.ones(3).half()], group=c.comm),
        TypeError,
        ("float32", "float16"),
    ),
    "AdamState: sparse": (
        lambda c: co.AdamState([sparse()], group=c.comm),
        TypeError,
        ("sparse|strided",),
    ),
    "optimizer: no parameters": (lambda c: fused_adam([]), ValueError, ("empty|param",)),
    "optimizer: not a leaf": (
        lambda c: fused_adam([leaf(3) * 2]),
        ValueError,
        ("leaf",),
    ),
    "optimizer: not a tensor": (
        lambda c: fused_adam([3.0]),
        TypeError,
        ("float|[Tt]ensor",),
    ),
    "optimizer: a single tensor": (
        lambda c: fused_adam(leaf(3)),
        TypeError,
        ("iterable|list|[Tt]ensor",),
    ),
    "optimizer: integer parameter": (
        lambda c: fused_adam([torch.ones(3, dtype=torch.int32)]),
        TypeError,
        ("int32",),
    ),
    "optimizer: complex parameter": (
        lambda c: fused_adam([leaf(3, dtype=torch.complex64)]),
        TypeError,
        ("complex64",),
    ),
    "optimizer: another device": (
        lambda c: fused_adam([leaf(3, device="meta")]),
        ValueError,
        ("meta",),
    ),
    "optimizer: lr < 0": (
        lambda c: fused_adam([leaf(3)], lr=-1.0),
        ValueError,
        ("lr|learning rate", "-1"),
    ),
    "optimizer: lr nan": (
        lambda c: fused_adam([leaf(3)], lr=NAN),
        ValueError,
        ("lr|learning rate", "nan"),
    ),
    "optimizer: beta = 1": (
        lambda c: fused_adam([leaf(3)], betas=(0.9, 1.0)),
        ValueError,
        ("beta",),
    ),
    "optimizer: eps < 0": (
        lambda c: fused_adam([leaf(3)], eps=-1e-8),
        ValueError,
        ("eps",),
    ),
    "optimizer: weight_decay nan": (
        lambda c: fused_adam([leaf(3)], weight_decay=NAN),
        ValueError,
        ("weight_decay", "nan"),
    ),
    "optimizer: lr < 0 in a group": (
        lambda c: fused_adam([{"params": [leaf(3)], "lr": -1.0}]),
        ValueError,
        ("lr|learning rate", "-1"),
    ),
}


# What the other ranks call meanwhile.
GOOD = {
    "all_reduce": lambda c: c.all_reduce(),
    "all_reduce_": lambda c: c.all_reduce_(),
    "reduce_scatter": lambda c: c.reduce_scatter(),
    "all_gather": lambda c: c.all_gather(),
    "empty": lambda c: c.comm.empty(3),
    "rs_adam_ag_": lambda c: c.adam(),
    "AdamState": lambda c: co.AdamState([torch.ones(3)], group=c.comm),
    "optimizer": lambda c: fused_adam([leaf(3)]),
}


def reject(case, bad_ranks, placement):
    bad, _, _ = CASES[case]
    calls = Calls(placement)
    before = [cases.bits(x) for x in calls.everything()]
    call = bad if calls.comm.rank in bad_ranks else GOOD[case.split(":")[0]]
    name, message, bases = raised(lambda: call(calls))
    assert [cases.bits(x) for x in calls.everything()] == before, "something was written"
    assert not calls.comm.closed
    world = calls.comm.world_size
    assert torch.equal(calls.all_reduce(), torch.full((6, 4), float(world)))
    calls.adam()
    expected = torch.full((5,), 0.9)
    cases.assert_close(calls.params[0], expected, cases.OPTIMIZER_TOLERANCE, "after the error")
    return name, message, bases


def says(message, words):
    return all(re.search(word, message) for word in words)


@EVERYWHERE
@pytest.mark.parametrize("case", CASES)
def test_bad_input_on_all_ranks(on_ranks, case):
    _, error, words = CASES[case]
    names = {kind.__name__ for kind in (error if isinstance(error, tuple) else (error,))}
    for name, message, bases in on_ranks.run(2, reject, case, [0, 1], "private"):
        assert names & set(bases) and "CommunicatorError" not in bases, (name, message)
        assert says(message, words), message


@EVERYWHERE
@pytest.mark.parametrize("placement", ["private", "heap"])
@pytest.mark.parametrize("case", CASES)
def test_bad_input_on_one_rank_reaches_the_others(on_ranks, case, placement):
    _, error, words = CASES[case]
    names = {kind.__name__ for kind in (error if isinstance(error, tuple) else (error,))}
    results = on_ranks.run(3, reject, case, [1], placement)
    name, message, bases = results[1]
    assert names & set(bases), (name, message)
    assert says(message, words), message
    for rank in (0, 2):
        name, quoted, bases = results[rank]
        assert name == "MismatchError", (name, quoted)
        assert "rank 1" in quoted and message in quoted, f"not quoted: {quoted}"


def good_then_bad_hyperparameter(key, value):
    """A hyperparameter that goes bad during training, on one rank."""
    params = [leaf(100), leaf(3, 3)]
    optimizer = fused_adam(params, lr=0.1)
    sum(p.sum() for p in params).backward()
    optimizer.step()
    before = [cases.digest(p) for p in params]
    rank = communicator().rank
    old = optimizer.param_groups[0][key]
    if rank == 1:
        optimizer.param_groups[0][key] = value
    name, message, _ = raised(optimizer.step)
    assert [cases.digest(p) for p in params] == before
    optimizer.param_groups[0][key] = old
    optimizer.step()
    assert [cases.digest(p) for p in params] != before
    return name, message


@EVERYWHERE
@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", NAN), ("lr", -1.0), ("betas", (0.9, 1.0)), ("eps", -1.0), ("weight_decay", NAN)],
    ids=str,
)
def test_hyperparameter_that_goes_bad(run_few, key, value):
    results = run_few(good_then_bad_hyperparameter, key, value)
    for rank, (name, message) in enumerate(results):
        assert name == ("ValueError" if rank == 1 else "MismatchError"), (name, message)


def bad_gradient(make):
    params = [leaf(3, 3), leaf(5)]
    optimizer = fused_adam(params, lr=0.1)
    sum(p.sum() for p in params).backward()
    before = [cases.digest(p) for p in params]
    if communicator().rank == 1:
        name, message, _ = raised(lambda: (make(params[0]), optimizer.step()))
    else:
        name, message, _ = raised(optimizer.step)
    assert [cases.digest(p) for p in params] == before
    params[0].grad = torch.ones(3, 3)
    optimizer.step()
    assert all((p < 1).all() for p in params)
    return name, message


def make_sparse(p):
    p.grad = sparse()


def make_sparse_by_autograd(p):
    p.grad = None
    nn.functional.embedding(torch.tensor([1]), p, sparse=True).sum().backward()


@EVERYWHERE
@pytest.mark.parametrize("make", [make_sparse, make_sparse_by_autograd])
def test_sparse_gradient_of_the_optimizer(run_few, make):
    results = run_few(bad_gradient, make)
    for rank, (name, message) in enumerate(results):
        assert name == ("TypeError" if rank == 1 else "MismatchError"), (name, message)
        assert "sparse" in message.lower(), message


def after_close(kind):
    comm = new_communicator(heap_bytes=4 << 20)
    x = comm.empty(10).fill_(1)
    private = torch.ones(10)
    params = [torch.ones(10)]
    state = co.AdamState(params, group=comm)
    comm.close()
    calls = {
        "all_reduce": lambda: co.all_reduce(private, group=comm),
        "all_reduce_": lambda: co.all_reduce_(x, group=comm),
        "reduce_scatter": lambda: co.reduce_scatter(x, group=comm),
        "all_gather": lambda: co.all_gather(x, group=comm),
        "rs_adam_ag_": lambda: co.rs_adam_ag_(params, [private], state, lr=0.1),
        "AdamState": lambda: co.AdamState(params, group=comm),
        "barrier": comm.barrier,
        "empty": lambda: comm.empty(3),
    }
    name, message, bases = raised(calls[kind])
    assert (x == 1).all() and (params[0] == 1).all()
    return name, message


@EVERYWHERE
@pytest.mark.parametrize(
    "kind",
    [
        "all_reduce",
        "all_reduce_",
        "reduce_scatter",
        "all_gather",
        "rs_adam_ag_",
        "AdamState",
        "barrier",
        "empty",
    ],
)
def test_closed_communicator(run_few, kind):
    for name, message in run_few(after_close, kind):
        assert name == "CommunicatorError" and "close" in message, (name, message)


def group_argument(group):
    name, message, _ = raised(lambda: co.all_reduce(torch.ones(3), group=group))
    communicator().barrier()
    return name, message


def test_group_of_another_type(run_pair):
    for name, message in run_pair(group_argument, "world"):
        assert name in ("TypeError", "ValueError") and "group" in message.lower(), (name, message)


def test_no_process_group():
    """Without init_process_group there is a sentence that says what to do."""
    name, message, _ = raised(lambda: co.all_reduce(torch.ones(3)))
    assert name in ("ValueError", "RuntimeError", "CommunicatorError"), (name, message)
    assert "init_process_group" in message or "process group" in message, message


def bad_communicator(options):
    name, message, _ = raised(lambda: co.Communicator(**options))
    communicator().barrier()
    return name, message


@pytest.mark.parametrize(
    "options",
    [{"heap_bytes": -1}, {"heap_bytes": "big"}, {"timeout": timedelta(0)}, {"timeout": 3}],
    ids=str,
)
def test_arguments_of_the_communicator(run_pair, options):
    ((key, value),) = options.items()
    for name, message in run_pair(bad_communicator, options):
        assert name in ("ValueError", "TypeError", "CommunicatorError"), (name, message)
        assert key in message and str(value) in message, message


def only_one_bad():
    options = {"heap_bytes": -5 if dist.get_rank() == 1 else 1 << 20}
    name, message, _ = raised(lambda: co.Communicator(**options))
    communicator().barrier()
    return name, message


def test_communicator_is_made_on_all_ranks_or_on_none(run_pair):
    for name, message in run_pair(only_one_bad):
        assert name in ("ValueError", "MismatchError", "CommunicatorError"), (name, message)
        assert "heap_bytes" in message and "rank 1" in message and "-5" in message, message


def not_a_member():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return raised(lambda: co.Communicator(group, heap_bytes=1 << 20).close())[:2]
    return raised(lambda: co.Communicator(group))[:2]


def test_group_without_this_rank(run_pair):
    results = run_pair(not_a_member)
    assert results[0][0] == "nothing"
    assert results[1][0] == "ValueError" and "member" in results[1][1], results[1]


def add_group(bad_rank):
    comm = communicator()
    parameter = leaf(3)
    optimizer = fused_adam([parameter])
    added = parameter if comm.rank == bad_rank else leaf(2)
    name, message, _ = raised(lambda: optimizer.add_param_group({"params": [added]}))
    total = co.all_reduce(torch.ones(3), group=comm)
    return name, message, total.tolist()


@EVERYWHERE
def test_bad_group_added_on_one_rank_reaches_the_others(on_ranks):
    results = on_ranks.run(3, add_group, 1)
    assert [name for name, _, _ in results] == ["MismatchError", "ValueError", "MismatchError"]
    for _, message, total in results:
        assert "more than one parameter group" in message
        assert total == [3.0] * 3
