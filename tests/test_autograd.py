"""Gradients of the collectives.

The oracle is autograd in float64 on one rank that has the inputs of all: the loss is what all ranks
compute together, where a replicated output counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cases
import pytest
import torch
from cases import DTYPES, PLACEMENTS, TOLERANCE
from harness import (
    assert_same_on_all_ranks,
    communicator,
    new_communicator,
    raised,
)
from test_reduce_scatter import part
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import coconet_ops as co

pytestmark = pytest.mark.backends("local", "emulated", "cuda")


@dataclass
class Op:
    """An op, and what it computes on all ranks from the inputs of all ranks."""

    call: Callable[[Tensor], Tensor]
    outputs: Callable[[list[Tensor]], list[Tensor]]
    replicated: bool = False  # one output, whose gradient is equal on all ranks
    replicated_input: bool = False
    uneven: bool = False  # may the ranks' inputs differ in rows along dim

    def expected(self, inputs: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """The gradients of all ranks' inputs."""
        inputs = [x.double().requires_grad_() for x in inputs]
        if self.replicated_input:
            inputs = inputs[:1] * len(inputs)
        outputs = self.outputs(inputs)
        terms = [
            (y * gradient.double()).sum() for y, gradient in zip(outputs, gradients, strict=True)
        ]
        loss = terms[0] if self.replicated else sum(terms)
        return list(torch.autograd.grad(loss, inputs))


def total(inputs, op="sum"):
    y = torch.stack(inputs).sum(0)
    return y / len(inputs) if op == "avg" else y


def every_op(comm, dim):
    """The ops with their options, along dim."""
    world = comm.world_size

    def in_place(op):
        return lambda x: co.all_reduce_(x * 1, op=op, group=comm)

    ops = {
        "copy_to_group": Op(
            lambda x: co.copy_to_group(x, group=comm), lambda xs: xs, replicated_input=True
        )
    }
    for op in ("sum", "avg"):
        reduced = {
            "outputs": lambda xs, op=op: [total(xs, op)] * len(xs),
            "replicated": True,
        }
        ops[f"all_reduce {op}"] = Op(
            lambda x, op=op: co.all_reduce(x, op=op, group=comm), **reduced
        )
        ops[f"all_reduce_ {op}"] = Op(in_place(op), **reduced)
        for split in ("tensor_split", "chunk"):
            ops[f"reduce_scatter {op} {split}"] = Op(
                lambda x, op=op, split=split: co.reduce_scatter(
                    x, dim=dim, op=op, split=split, group=comm
                ),
                lambda xs, op=op, split=split: [
                    part(total(xs, op), split, dim, r, world) for r in range(len(xs))
                ],
            )
    for grad in ("slice", "reduce_scatter"):
        ops[f"all_gather {grad}"] = Op(
            lambda x, grad=grad: co.all_gather(x, dim=dim, grad=grad, group=comm),
            lambda xs: [torch.cat(xs, dim)] * len(xs),
            replicated=grad == "slice",
            uneven=True,
        )
    return ops


SHAPES_AND_DIMS = (((7,), 0), ((5, 3), 0), ((5, 3), -1), ((2, 4, 3), 1))


def every_gradient(dtype, placement):
    comm = communicator()
    rank, world = comm.rank, comm.world_size
    for shape, dim in SHAPES_AND_DIMS:
        for name, op in every_op(comm, dim).items():
            for layout in cases.layouts(shape):
                what = (name, shape, dim, layout)
                shapes = [list(shape) for _ in range(world)]
                if op.uneven:
                    for r in range(world):  # 0 rows on rank 1
                        shapes[r][dim] = (3 * r + 2) % 5
                inputs = [cases.normals(s, dtype, r, 1) for r, s in enumerate(shapes)]
                if op.replicated_input:
                    inputs = inputs[:1] * world
                outputs = op.outputs(inputs)
                gradients = [
                    cases.normals(y.shape, dtype, 0 if op.replicated else r, 2)
                    for r, y in enumerate(outputs)
                ]
                most = max(cases.room(s, layout) for s in shapes)
                x, _ = cases.placed(comm, inputs[rank], placement, layout, most)
                x.requires_grad_()
                y = op.call(x)
                g, _ = cases.placed(comm, gradients[rank], "private", layout)
                y.backward(g)
                expected = op.expected(inputs, gradients)[rank]
                cases.assert_close(x.grad, expected, TOLERANCE[dtype], what)
                assert x.grad.dtype == dtype, what
                with torch.no_grad():
                    assert cases.bits(op.call(x)) == cases.bits(y), what


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_gradients_equal_float64_for_any_dim_layout_and_shards(run, dtype, placement):
    run(every_gradient, dtype, placement)


def of_sums():
    """sum().backward() gives an expanded gradient, with strides of 0."""
    comm = communicator()
    world = comm.world_size
    for name, op in every_op(comm, 0).items():
        x = torch.ones(5, 3, requires_grad=True)
        op.call(x).sum().backward()
        summed = name in ("copy_to_group", "all_gather reduce_scatter")
        expected = world if summed else 1 / world if " avg" in name else 1
        cases.assert_close(
            x.grad, torch.full((5, 3), expected).double(), TOLERANCE[torch.float32], name
        )


def test_expanded_gradients(run):
    run(of_sums)


def equal_everywhere():
    comm = communicator()
    x = cases.normals((1000,), torch.bfloat16, 0).requires_grad_()
    co.copy_to_group(x, group=comm).backward(cases.normals((1000,), torch.bfloat16, comm.rank, 1))
    return cases.digest(x.grad)


def test_summed_gradients_are_bitwise_equal_on_all_ranks(run):
    assert_same_on_all_ranks(run(equal_everywhere))


def results_in_the_heap():
    comm = communicator()
    for name, op in every_op(comm, 0).items():
        gradients = []
        for placement in ("private", "heap"):
            x, _ = cases.placed(comm, cases.normals((6, 4), torch.float32, 0), placement)
            y = op.call(x.requires_grad_())
            if not name.startswith("all_reduce_ "):  # of an intermediate result
                assert comm.owns(y) == (placement == "heap"), name
            z = y * y  # the graph keeps the block of y, or a later tensor would take it
            del y
            later = [comm.empty(6 * comm.world_size, 4).fill_(float("nan")) for _ in range(3)]
            z.sum().backward()
            del later
            gradients.append(cases.bits(x.grad))
        assert gradients[0] == gradients[1], name


def test_heap_tensors_as_inputs(run_few):
    run_few(results_in_the_heap)


def several_uses():
    comm = communicator()
    world = comm.world_size
    x = torch.full((4, 2), comm.rank + 1.0, requires_grad=True)
    y = co.all_reduce(x, group=comm)
    z = co.all_reduce(x * 2, op="avg", group=comm)
    again = co.reduce_scatter(y * x, split="chunk", group=comm)
    (y.sum() + 3 * z.sum() + again.sum()).backward()
    # of y: 1 + x (from the third term), of z: 3 * 2 / world, of x: y
    expected = 1 + x.detach() + 6 / world + y.detach()
    cases.assert_close(x.grad, expected.double(), {"rtol": 1e-6, "atol": 1e-6}, "")


def test_a_tensor_that_several_ops_use(run_few):
    run_few(several_uses)


def second_derivatives():
    comm = communicator()
    rank, world = comm.rank, comm.world_size
    rows = rank + 1

    def of(call, shape, gradient, direction):
        """d <direction, dx> / d gradient, where dx is the gradient of x."""
        x = torch.zeros(shape, requires_grad=True)
        gradient.requires_grad_()
        (dx,) = torch.autograd.grad(call(x), x, gradient, create_graph=True)
        return torch.autograd.grad(dx, gradient, direction)[0]

    def normals(*shape, rank=0, seed=0):
        return cases.normals(shape, torch.float32, rank, seed)

    everyone = world * (world + 1) // 2
    directions = [normals(r + 1, 2, rank=r) for r in range(world)]
    for grad in ("slice", "reduce_scatter"):
        result = of(
            lambda x, grad=grad: co.all_gather(x, grad=grad, group=comm),
            (rows, 2),
            normals(everyone, 2),
            directions[rank],
        )
        assert torch.equal(result, torch.cat(directions)), grad
    direction = normals(7, 2)
    own = direction.tensor_split(world)[rank]
    result = of(
        lambda x: co.reduce_scatter(x, group=comm),
        (7, 2),
        normals(*own.shape, rank=rank),
        direction,
    )
    assert torch.equal(result, own)
    for call in (co.all_reduce, co.copy_to_group):
        result = of(lambda x, call=call: call(x, group=comm), (7, 2), normals(7, 2), direction)
        assert torch.equal(result, direction), call.__name__


def test_gradients_of_gradients(run_few):
    run_few(second_derivatives)


# --- in place ------------------------------------------------------------------------------------


def in_place():
    comm = communicator()
    world = comm.world_size
    leaf = torch.full((3, 4), comm.rank + 1.0, requires_grad=True)
    everyone = world * (world + 1) / 2

    y = leaf * 2
    assert co.all_reduce_(y, group=comm) is y
    (y * 5).sum().backward()
    assert (y == 2 * everyone).all() and (leaf.grad == 10).all()

    for view in (lambda t: t[1:], lambda t: t.t(), lambda t: t[:, 1:3]):
        leaf.grad = None
        y = leaf * 2
        part = view(y)
        co.all_reduce_(part, op="avg", group=comm)
        (y * 5).sum().backward()
        expected = torch.full((3, 4), 10.0)
        view(expected).fill_(10 / world)
        cases.assert_close(leaf.grad, expected.double(), TOLERANCE[torch.float32], "view")
        assert (view(y.detach()) == view(torch.full((3, 4), 2 * everyone / world))).all()


def test_in_place_on_results_and_their_views(run_few):
    run_few(in_place)


def stale():
    comm = communicator()
    for grad_mode in (torch.enable_grad, torch.no_grad):
        for placement in ("private", "heap"):
            x, _ = cases.placed(comm, torch.ones(3, 2), placement)
            x.requires_grad_()
            for y in ((x * 1).exp(), (x * 1).exp().t()):
                z = (y * y).sum() if grad_mode is torch.no_grad else y
                with grad_mode():
                    co.all_reduce_(y, group=comm)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    z.sum().backward()


def test_in_place_change_of_a_saved_tensor_is_noticed(run_few):
    run_few(stale)


def of_a_leaf(view, bad_ranks):
    comm = communicator()
    x = torch.ones(4, requires_grad=comm.rank in bad_ranks)
    outcome = raised(lambda: co.all_reduce_(view(x), group=comm))
    assert (x == 1).all()
    assert (co.all_reduce(torch.ones(2), group=comm) == comm.world_size).all()
    with torch.no_grad():
        co.all_reduce_(view(x), group=comm)
    return outcome[:2]


def itself(x):
    return x


def first(x):
    return x[:2]


@pytest.mark.parametrize("view", [itself, first])
def test_in_place_change_of_a_leaf_is_refused(run_few, view):
    for name, message in run_few(of_a_leaf, view, range(9)):
        assert name == "RuntimeError" and "leaf" in message and "all_reduce_" in message, message
    results = run_few(of_a_leaf, view, [1])
    assert results[1][0] == "RuntimeError"
    assert results[0][0] == "MismatchError" and results[1][1] in results[0][1], results[0]


# --- with the rest of torch ----------------------------------------------------------------------


class ColumnThenRow(nn.Module):
    """Megatron's MLP: the first weight is cut by columns, the second by rows."""

    def __init__(self, comm, first, second, gather=False):
        super().__init__()
        self.comm, self.gather = comm, gather
        rank, world = comm.rank, comm.world_size
        self.first = nn.Parameter(first.tensor_split(world, 1)[rank].clone())
        self.second = nn.Parameter(second.tensor_split(world, 0)[rank].clone())

    def forward(self, x):
        if self.gather:  # x holds this rank's tokens
            x = co.all_gather(x, grad="reduce_scatter", group=self.comm)
            return co.reduce_scatter((x @ self.first).relu() @ self.second, group=self.comm)
        x = co.copy_to_group(x, group=self.comm)
        return co.all_reduce((x @ self.first).relu() @ self.second, group=self.comm)


def tensor_parallel(gather, how):
    comm = communicator()
    rank, world = comm.rank, comm.world_size
    tokens, first, second, target = (
        cases.normals(shape, torch.float32, 0, seed)
        for seed, shape in enumerate([(7, 5), (5, 9), (9, 5), (7, 5)])
    )
    dense = [t.double().requires_grad_() for t in (tokens, first, second)]
    y = dense[0] + (dense[0] @ dense[1]).relu() @ dense[2]
    (y * target).sum().backward()

    def mine(t, dim):
        return t.tensor_split(world, dim)[rank]

    x, target = (mine(t, 0).clone() if gather else t for t in (tokens, target))
    x.requires_grad_()
    model = ColumnThenRow(comm, first, second, gather)
    if how == "plain":
        z = x + model(x)
    else:
        z = x + checkpoint(model, x, use_reentrant=how == "reentrant checkpoint")
    (z * target).sum().backward()
    close = {"rtol": 1e-5, "atol": 1e-5}
    cases.assert_close(x.grad, mine(dense[0].grad, 0) if gather else dense[0].grad, close, "x")
    cases.assert_close(model.first.grad, mine(dense[1].grad, 1), close, "first")
    cases.assert_close(model.second.grad, mine(dense[2].grad, 0), close, "second")


@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("gather", [False, True], ids=["replicated tokens", "cut tokens"])
def test_tensor_and_sequence_parallel_layers_equal_the_dense_ones(run, gather, how):
    run(tensor_parallel, gather, how)


def without_gradients():
    comm = communicator()
    world = comm.world_size
    p = nn.Parameter(torch.ones(4, 2))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for name, op in every_op(comm, 0).items():
                of_view = p.view_as(p).requires_grad  # True in inference mode
                expected = of_view if name == "copy_to_group" else False
                assert op.call(p).requires_grad == expected, name
    for name, op in every_op(comm, 0).items():
        assert op.call(p).requires_grad and not op.call(p.detach()).requires_grad, name
        assert type(op.call(p)) is Tensor, name
    for dtype in (torch.int64, torch.bool, torch.complex64):
        x = torch.ones(2, 3, dtype=dtype)
        assert co.all_gather(x, group=comm).dtype == dtype
    z = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    co.all_gather(z, group=comm).backward(torch.arange(3 * world) * 1j)
    assert torch.equal(z.grad, (torch.arange(3) + 3 * comm.rank) * 1j)


def test_modes_without_gradients_and_dtypes_without(run_few):
    run_few(without_gradients)


def forward_mode():
    comm = communicator()
    for op in every_op(comm, 0).values():
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))
            with pytest.raises(NotImplementedError, match="forward-mode"):
                op.call(x)


@pytest.mark.backends()  # torch has one level of forward mode per process
def test_forward_mode_is_refused(run_pair):
    run_pair(forward_mode)


def bad_arguments():
    comm = communicator()
    return [
        raised(lambda: co.all_gather(torch.ones(2), grad="sum", group=comm)),
        raised(lambda: co.all_gather(torch.ones(2).bool(), grad="reduce_scatter", group=comm)),
        raised(lambda: co.copy_to_group(torch.ones(2).bool(), group=comm)),
        raised(lambda: co.copy_to_group([1.0], group=comm)),
    ]


def test_bad_arguments(run_pair):
    for grad, gathered, dtype, kind in run_pair(bad_arguments):
        assert grad[0] == "ValueError" and "slice" in grad[1] and "'sum'" in grad[1], grad
        assert gathered[0] == "TypeError" and "bool" in gathered[1], gathered
        assert dtype[0] == "TypeError" and "copy_to_group" in dtype[1], dtype
        assert kind[0] == "TypeError" and "list" in kind[1], kind


def dies_in_backward():
    comm = new_communicator(heap_bytes=4 << 20)
    x = torch.ones(5, requires_grad=True)
    y = co.copy_to_group(x, group=comm).sum()
    if comm.rank == 1:
        comm.close()
        return raised(y.backward)[:2]
    return raised(y.backward)[:2]


def test_errors_of_the_backward_pass_reach_the_caller(run_pair):
    results = run_pair(dies_in_backward)
    assert results[0][0] == "PeerLostError" and "rank 1" in results[0][1], results
    assert results[1][0] == "CommunicatorError", results


def sixteen():
    comm = new_communicator(heap_bytes=8 << 20)
    for name, op in every_op(comm, 0).items():
        shape = (comm.rank % 3 if op.uneven else 20, 2)
        x = torch.ones(shape, requires_grad=True)
        op.call(x).sum().backward()
        summed = name in ("copy_to_group", "all_gather reduce_scatter")
        expected = 16.0 if summed else 1 / 16 if " avg" in name else 1.0
        assert torch.equal(x.grad, torch.full(shape, expected)), name
    comm.close()


def test_world_size_16(run_sixteen):
    run_sixteen(sixteen)
