"""The collectives under torch.compile: one graph, the same bits as eager; and torch's opcheck."""

from __future__ import annotations

import cases
import torch
import torch.distributed as dist
from harness import communicator, raised, run_fresh, values

import coconet_ops as co


def compiled(function, backend="aot_eager", **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def opchecked():
    comm = communicator()
    rank, world, number = comm.rank, comm.world_size, comm._id
    sizes = [r + 2 for r in range(world)]
    rows, everyone = sizes[rank], sum(sizes)
    begins = torch.tensor([0, *sizes]).cumsum(0)
    ops = torch.ops.coconet

    def samples(make):
        yield ops.all_reduce, make(4, 3), "avg", number
        yield ops.all_reduce_, make(4, 3).clone(), "sum", number
        yield ops.all_reduce_, make(4, 3).clone().t(), "avg", number
        yield ops.reduce_scatter, make(5, 3), 0, "sum", "chunk", number
        yield ops.reduce_scatter, make(3, 5).t(), -1, "avg", "tensor_split", number
        yield ops.all_gather, make(rows, 3), 0, everyone, "slice", number
        yield ops.all_gather, make(3, rows), -1, everyone, "reduce_scatter", number
        yield ops.copy_to_group, make(2, 3), number
        yield ops.own_rows, make(everyone, 3), begins, 0, rows, number
        yield ops.reduce_scatter_rows, make(3, everyone), begins, -1, rows, number

    for requires_grad in (False, True):

        def make(*shape, requires_grad=requires_grad):
            return torch.randn(shape).requires_grad_(requires_grad)

        for op, *arguments in samples(make):
            torch.library.opcheck(op.default, tuple(arguments))
    arguments = (make(rows, 3, requires_grad=False), 0, everyone, number)
    torch.library.opcheck(ops.all_gather_begins.default, arguments)


def test_opcheck(run_pair):
    run_pair(opchecked)


def layers(x, w, comm):
    """Every op, and every way to say which group."""
    y = torch.relu(co.copy_to_group(x) @ w)
    y = co.all_reduce(y, op="avg", group=comm)
    own = co.reduce_scatter(y, dim=-1, split="chunk", group=dist.group.WORLD)
    again = co.all_gather(own, dim=-1, size=y.shape[-1], grad="reduce_scatter", group=comm)
    z = again * 2
    assert co.all_reduce_(z, group=comm) is z
    own = co.reduce_scatter(z * x.sum(), op="avg")
    return z.sum() + (co.all_gather(x) ** 2).sum() + own.sum()


def forward_and_backward(function, rows, comm):
    x = cases.normals((rows, 5), torch.float32, 0).requires_grad_()
    w = cases.normals((5, 7), torch.float32, comm.rank).requires_grad_()
    loss = function(x, w, comm)
    loss.backward()
    return [cases.bits(t) for t in (loss, x.grad, w.grad)]


def same_as_eager():
    comm = communicator()
    fast = compiled(layers)
    assert forward_and_backward(fast, 6, comm) == forward_and_backward(layers, 6, comm)
    with torch.no_grad():
        x, w = torch.ones(3, 5), torch.ones(5, 7)
        assert torch.equal(fast(x, w, comm), layers(x, w, comm))


def test_one_graph_with_the_bits_of_eager(run_few):
    run_few(same_as_eager)


def any_number_of_rows():
    comm = communicator()
    fast = compiled(layers)
    for rows in (4, 5, 6, 7, 12):
        x = cases.normals((rows, 5), torch.float32, 0).requires_grad_()
        w = cases.normals((5, 7), torch.float32, comm.rank).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        with torch._dynamo.config.patch(error_on_recompile=True):
            fast(x, w, comm).backward()
        gradients = [cases.bits(t.grad) for t in (x, w)]
        assert gradients == forward_and_backward(layers, rows, comm)[1:], rows


def test_dynamic_shapes(run_pair):
    run_pair(any_number_of_rows)


def in_place():
    comm = communicator()
    rank, world = comm.rank, comm.world_size

    def of_input(x):
        co.all_reduce_(x, group=comm)
        return x * 2

    def of_view(x):
        y = x * 3
        co.all_reduce_(y[1:], op="avg", group=comm)
        return y

    # Some ranks compile and some don't: they call the same.
    choose = compiled if rank % 2 else lambda function: function
    x = torch.full((4, 2), rank + 1.0)
    y = choose(of_input)(x)
    everyone = world * (world + 1) / 2
    assert (x == everyone).all() and (y == 2 * everyone).all()

    x = torch.full((3,), rank + 1.0, requires_grad=True)
    y = choose(of_view)(x)
    y.sum().backward()
    assert torch.allclose(y, torch.tensor([3 * rank + 3.0, *[3 * everyone / world] * 2]))
    assert torch.allclose(x.grad, torch.tensor([3.0, *[3 / world] * 2]))


def test_in_place_and_ranks_that_do_not_compile(run_few):
    run_few(in_place)


def shards():
    comm = communicator()
    rank, world = comm.rank, comm.world_size
    everyone = world * (world + 1) // 2
    x = torch.full((rank + 1, 2), float(rank), requires_grad=True)
    for grad, factor in (("slice", 1), ("reduce_scatter", world)):

        def given(x, grad=grad):
            return co.all_gather(x, size=everyone, grad=grad, group=comm) * 5

        x.grad = None
        y = compiled(given)(x)
        y.sum().backward()
        assert y[:, 0].tolist() == [5 * r for r in range(world) for _ in range(r + 1)]
        assert torch.equal(x.grad, torch.full((rank + 1, 2), 5.0 * factor))

    equal = compiled(lambda x: co.all_gather(x, dim=1, group=comm))
    assert torch.equal(equal(torch.full((2, 3), 1.0)), torch.ones(2, 3 * world))
    outcome = raised(lambda: equal(torch.ones(2, rank + 1)))
    assert torch.equal(equal(torch.full((2, 3), 1.0)), torch.ones(2, 3 * world))
    return outcome[:2]


def test_shards_of_different_sizes_need_the_total(run_few):
    for name, message in run_few(shards):
        assert name == "MismatchError" and "size" in message and "equal shards" in message, message


def found_when_compiling():
    comm = communicator()
    leaf = torch.ones(3, requires_grad=True)
    calls = {
        "int8": lambda: co.all_reduce(torch.ones(3, dtype=torch.int8), group=comm),
        "max": lambda: co.all_reduce_(torch.ones(3), op="max", group=comm),
        "dim is 4": lambda: co.reduce_scatter(torch.ones(3), dim=4, group=comm),
        "'half'": lambda: co.all_gather(torch.ones(3), size=3, grad="half", group=comm),
        "leaf": lambda: co.all_reduce_(leaf, group=comm),
    }
    outcomes = {word: raised(compiled(call))[1] for word, call in calls.items()}
    assert (co.all_reduce(torch.ones(3), group=comm) == comm.world_size).all()
    assert (leaf == 1).all()
    return outcomes


def test_bad_arguments_are_found_when_compiling(run_pair):
    for outcomes in run_pair(found_when_compiling):
        for word, message in outcomes.items():
            assert word in message, (word, message)


def another_communicator():
    first = co.Communicator(heap_bytes=4 << 20)
    fast = compiled(lambda x, comm: co.all_reduce(x, group=comm))
    x = torch.ones(3)
    assert (fast(x, first) == first.world_size).all()
    first.close()
    closed = raised(lambda comm=first: fast(x, comm))
    second = co.Communicator(heap_bytes=4 << 20)
    assert (fast(x, second) == second.world_size).all()
    second.close()

    default = compiled(lambda x: co.all_reduce(x))
    rank, world = dist.get_rank(), dist.get_world_size()
    assert (default(x) == world).all()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world
    )
    stale = raised(lambda: default(x))
    torch.compiler.reset()
    assert (default(x) == world).all()
    return closed[:2], stale[:2]


def test_code_for_a_communicator_that_is_gone():
    for closed, stale in values(run_fresh(2, another_communicator)):
        assert closed[0] == "CommunicatorError" and "close" in closed[1], closed
        assert stale[0] == "CommunicatorError" and "torch.compiler.reset()" in stale[1], stale


def numbers():
    comm = communicator()
    alone = [dist.new_group([r]) for r in range(comm.world_size)][comm.rank]
    small = co.Communicator(alone, heap_bytes=1 << 20)
    result = (comm._id & 0xFFFF, small._id & 0xFFFF)
    small.close()
    return result


def test_the_number_of_a_communicator_tells_rank_and_world_size(run_few):
    """Inductor's cache on disk knows a graph by its code: a number that meant one rank today and
    another tomorrow would give results of the wrong shape."""
    results = run_few(numbers)
    assert len({*results}) == len(results)
    assert len({number for pair in results for number in pair}) == len(results) + 1


def with_inductor():
    comm = communicator()

    def step(x):
        y = x * 2
        co.all_reduce_(y, group=comm)
        return co.reduce_scatter(y, op="avg", group=comm) + 1

    x = torch.full((5, 2), comm.rank + 1.0, requires_grad=True)
    y = compiled(step, backend="inductor")(x)
    y.sum().backward()
    gradient, x.grad = x.grad, None
    expected = step(x)
    expected.sum().backward()
    assert torch.equal(y, expected) and torch.equal(gradient, x.grad)


def test_inductor(run_pair):
    run_pair(with_inductor)
