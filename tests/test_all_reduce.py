"""all_reduce: the sum or average over the ranks, on every rank."""

from __future__ import annotations

import cases
import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, PLACEMENTS, REDUCE_DTYPES, SHAPES, TOLERANCE
from harness import assert_same_on_all_ranks, communicator, new_communicator

import coconet_ops as co

pytestmark = pytest.mark.backends("local", "emulated", "cuda")


def every_shape_and_layout(dtype, placement, op):
    comm = communicator()
    digests = {}
    for seed, shape in enumerate(SHAPES):
        for layout in cases.layouts(shape):
            for make in (cases.integers, cases.normals):
                inputs = [make(shape, dtype, rank, seed) for rank in range(comm.world_size)]
                if make is cases.integers and op == "avg":
                    inputs = [x * comm.world_size for x in inputs]
                expected = cases.reduced(inputs, op)
                what = (make.__name__, shape, layout)
                own = inputs[comm.rank]

                x, buffer = cases.placed(comm, own, placement, layout)
                before = cases.bits(buffer)
                cases.poison(comm, own.nbytes)
                y = co.all_reduce(x, op=op, group=comm)
                assert y.dtype == dtype
                if x.is_contiguous() and x.numel() and placement != "mixed":
                    assert comm.owns(y) == (placement == "heap"), what
                assert cases.bits(buffer) == before, f"{what}: the input changed"

                gaps = cases.arranged(buffer.clone(), shape, layout)
                assert co.all_reduce_(x, op=op, group=comm) is x
                for result, kind in ((y, "out of place"), (x, "in place")):
                    if make is cases.integers:
                        cases.assert_exact(result, expected, (kind, *what))
                    else:
                        cases.assert_close(result, expected, TOLERANCE[dtype], (kind, *what))
                assert cases.bits(x) == cases.bits(y), f"{what}: in place differs"
                x.copy_(gaps)
                assert cases.bits(buffer) == before, f"{what}: wrote beside the tensor"
                digests[what] = cases.digest(y)
    return digests


REDUCTIONS = [
    pytest.param(dtype, op, id=f"{cases.name(dtype)}-{op}")
    for dtype in REDUCE_DTYPES
    for op in ("sum", "avg")
    if op == "sum" or dtype.is_floating_point
]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_equals_float64_for_any_shape_and_layout(run, dtype, placement, op):
    assert_same_on_all_ranks(run(every_shape_and_layout, dtype, placement, op))


def one_result_per_placement(dtype, shape):
    """The sum in fp32, in rank order, rounded once."""
    comm = communicator()
    own = cases.normals(shape, dtype, comm.rank)
    total = cases.normals(shape, dtype, 0).float()
    for rank in range(1, comm.world_size):
        total = total + cases.normals(shape, dtype, rank).float()
    digests = {cases.digest(total.to(dtype))}
    for placement in PLACEMENTS:
        for layout in cases.layouts(shape):
            for _ in range(3):
                x, _ = cases.placed(comm, own, placement, layout)
                digests.add(cases.digest(co.all_reduce(x, group=comm)))
    return digests


@pytest.mark.parametrize("shape", [(1134,), (1023, 7), (257, 1031)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_bits_do_not_depend_on_rank_run_placement_or_layout(run, dtype, shape):
    results = run(one_result_per_placement, dtype, shape)
    assert_same_on_all_ranks(results)
    assert len(results[0]) == 1


def large(dtype, placement):
    comm = communicator()
    numel = cases.LARGER_THAN_STAGING
    index = torch.arange(numel)
    x, _ = cases.placed(comm, (index % 23 - 11 + comm.rank).to(dtype), placement)
    cases.poison(comm, x.nbytes)
    y = co.all_reduce(x, group=comm)
    world = comm.world_size
    expected = (index % 23 - 11) * world + world * (world - 1) // 2
    assert torch.equal(y, expected.to(dtype))
    assert torch.equal(co.all_reduce_(x, group=comm), y)


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", REDUCE_DTYPES, ids=cases.name)
def test_tensors_larger_than_the_staging_chunks(run_few, dtype, placement):
    run_few(large, dtype, placement)


def sizes_around_boundaries(placement):
    comm = communicator()
    for numel in [*range(140), 255, 256, 257, 1023, 1024, 1025, 4095, 4097, 65535, 65537]:
        x, _ = cases.placed(comm, torch.arange(numel) % 50 + float(comm.rank), placement)
        y = co.all_reduce(x, group=comm)
        world = comm.world_size
        expected = torch.arange(numel) % 50 * world + float(world * (world - 1) // 2)
        assert torch.equal(y, expected), numel


@pytest.mark.parametrize("placement", ["private", "heap"])
def test_every_small_size(run, placement):
    run(sizes_around_boundaries, placement)


def sizes_around_the_one_shot_limit(dtype, placement):
    comm = communicator()
    limit = comm.tuning["one_shot_bytes"] // dtype.itemsize
    for numel in (limit - 1, limit, limit + 1, 2 * limit + 1):
        own = torch.arange(numel) % 50 + comm.rank
        x, _ = cases.placed(comm, own.to(dtype), placement)
        world = comm.world_size
        expected = (torch.arange(numel) % 50 * world + world * (world - 1) // 2).to(dtype)
        # Each call uses the other attachment; a fast rank is one call ahead.
        for _ in range(5):
            assert torch.equal(co.all_reduce(x, group=comm), expected), numel
        shard = co.reduce_scatter(x, group=comm)
        assert torch.equal(shard, expected.tensor_split(world)[comm.rank]), numel
        rows = torch.full((numel + comm.rank,), comm.rank).to(dtype)
        gathered = co.all_gather(rows, group=comm)
        assert gathered.tolist() == [r for r in range(world) for _ in range(numel + r)], numel
        assert torch.equal(co.all_reduce_(x, group=comm), expected), numel


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=cases.name)
def test_sizes_around_the_one_shot_limit(run, dtype, placement):
    run(sizes_around_the_one_shot_limit, dtype, placement)


def wrapping_integers(dtype, placement):
    comm = communicator()
    own = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min, 1], dtype=dtype)
    expected = own.clone()
    for _ in range(1, comm.world_size):
        expected += own
    x, _ = cases.placed(comm, own.repeat(50), placement)
    assert torch.equal(co.all_reduce(x, group=comm), expected.repeat(50))


@pytest.mark.parametrize("placement", ["private", "heap"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=cases.name)
def test_integers_wrap_around(run, dtype, placement):
    run(wrapping_integers, dtype, placement)


def special_values(dtype, placement):
    comm = communicator()
    inf, nan = float("inf"), float("nan")
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    columns = [
        # rank 0, the other ranks: the sum
        (inf, 1.0),
        (-inf, 1.0),
        (inf, -inf),
        (nan, 1.0),
        (1.0, nan),
        (largest, largest),  # overflows
        (-largest, -largest),
        (largest, -largest),
        (tiny, 0.0),  # subnormal
        (tiny, tiny),
        (-0.0, -0.0),
        (-0.0, 0.0),
        (1.0, torch.finfo(dtype).eps / 2),  # a tie
        (1.0 + torch.finfo(dtype).eps, torch.finfo(dtype).eps / 2),
    ] * 3
    inputs = [
        torch.tensor([column[min(rank, 1)] for column in columns]).to(dtype)
        for rank in range(comm.world_size)
    ]
    expected = inputs[0].float()
    for x in inputs[1:]:
        expected = expected + x.float()
    expected = expected.to(dtype)
    x, _ = cases.placed(comm, inputs[comm.rank], placement)
    y = co.all_reduce(x, group=comm)
    number = ~expected.isnan()
    assert torch.equal(y.isnan(), expected.isnan()), (y, expected)
    assert cases.bits(y[number]) == cases.bits(expected[number]), (y, expected)


@pytest.mark.parametrize("placement", ["private", "heap"])
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_infinities_nans_subnormals_and_ties_follow_ieee(run_few, dtype, placement):
    run_few(special_values, dtype, placement)


def group_arguments():
    comm = communicator()
    expected = torch.full((5,), float(comm.world_size))
    for group in (None, dist.group.WORLD, comm, co.communicator()):
        assert torch.equal(co.all_reduce(torch.ones(5), group=group), expected)
    assert torch.equal(co.all_reduce(torch.ones(5)), expected)


@pytest.mark.backends()
def test_group_is_a_process_group_a_communicator_or_none(run):
    run(group_arguments)


def unusual_views():
    comm = communicator()
    world = comm.world_size
    x = torch.ones(1).expand(6, 3)
    assert torch.equal(co.all_reduce(x, group=comm), torch.full((6, 3), float(world)))

    z = torch.complex(torch.zeros(9), torch.arange(9.0)).conj().imag
    assert z.is_neg()
    assert torch.equal(co.all_reduce(z, group=comm), -torch.arange(9.0) * world)

    x = torch.arange(12.0).view(3, 4)[1:, 1::2]
    assert torch.equal(co.all_reduce(x.t(), group=comm), x.t() * world)

    x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last).fill_(2)
    assert torch.equal(co.all_reduce(x, group=comm), torch.full((2, 3, 4, 5), 2.0 * world))


def test_expanded_negated_and_channels_last_views(run_few):
    run_few(unusual_views)


def other_places():
    """The operands of the ranks needn't lie at the same place of the heap."""
    comm = communicator()
    rank, world = comm.rank, comm.world_size
    for step in range(2):
        blocks = [comm.empty(500) for _ in range(world)]
        for block in blocks:
            block.fill_(-7)
        x = blocks[rank][10 * rank + step : 10 * rank + step + 300]
        x.copy_(torch.arange(300.0) + rank)
        expected = torch.arange(300.0) * world + world * (world - 1) / 2
        assert torch.equal(co.all_reduce(x, group=comm), expected)
        y = co.reduce_scatter(x, group=comm)
        assert torch.equal(y, expected.tensor_split(world)[rank])
        assert torch.equal(co.all_gather(y, group=comm), expected)
        assert torch.equal(co.all_reduce_(x, group=comm), expected)
        for number, block in enumerate(blocks):
            beside = 200 if number == rank else 500
            assert (block == -7).sum() == beside, "wrote beside the tensor"


def test_ranks_may_use_different_places_of_the_heap(run):
    run(other_places)


def many_dimensions():
    comm = communicator()
    shape = cases.MANY_DIMENSIONS
    inputs = [cases.integers(shape, torch.float32, rank) for rank in range(comm.world_size)]
    for placement in PLACEMENTS:
        x, _ = cases.placed(comm, inputs[comm.rank], placement)
        cases.assert_exact(co.all_reduce(x, group=comm), cases.reduced(inputs), placement)
        part = co.reduce_scatter(x, dim=-2, group=comm)
        total = cases.reduced(inputs).tensor_split(comm.world_size, -2)
        cases.assert_exact(part, total[comm.rank], placement)
        cases.assert_exact(
            co.all_gather(x, dim=36, group=comm), torch.cat(inputs, 36).double(), placement
        )


def test_tensors_of_many_dimensions(run_few):
    run_few(many_dimensions)


def of_parameters():
    """What people reduce beside plain tensors: parameters, their data, their gradients."""
    comm = communicator()
    p = torch.nn.Parameter(torch.ones(5))
    p.sum().backward()
    expected = torch.full((5,), float(comm.world_size))
    co.all_reduce_(p.grad, group=comm)
    assert torch.equal(p.grad, expected)
    assert torch.equal(co.all_reduce(p.detach(), group=comm), expected)
    with torch.no_grad():
        assert torch.equal(co.all_reduce(p, group=comm), expected)
        assert co.all_reduce_(p, group=comm) is p
    assert torch.equal(p.detach(), expected)
    co.all_reduce_(p.data, group=comm)
    assert torch.equal(p.detach(), expected * comm.world_size)
    with torch.inference_mode():
        x = torch.ones(5)
        assert torch.equal(co.all_reduce(x, group=comm), expected)
        assert torch.equal(co.all_reduce_(x, group=comm), expected)


def test_parameters_and_gradients(run_few):
    run_few(of_parameters)


def two_rows_share_memory():
    comm = communicator()
    x = torch.ones(3).expand(4, 3)
    with pytest.raises((TypeError, ValueError), match="all_reduce_"):
        co.all_reduce_(x, group=comm)
    assert torch.equal(x, torch.ones(4, 3))


def test_in_place_refuses_a_tensor_that_overlaps_itself(run_few):
    run_few(two_rows_share_memory)


def many_in_a_row():
    comm = communicator()
    x, _ = cases.placed(comm, torch.zeros(1000), "heap")
    y = torch.zeros(1000)
    own = 1 + comm.rank - (comm.world_size - 1) / 2  # 1 on average
    for step in range(300):
        co.all_reduce_(x.add_(own), op="avg", group=comm)
        co.all_reduce_(y.add_(own), op="avg", group=comm)
        assert torch.equal(x, torch.full((1000,), step + 1.0)), step
        assert torch.equal(y, x), step


def test_repeated_calls_see_no_stale_data(run):
    run(many_in_a_row)


def sixteen(placement):
    comm = new_communicator(heap_bytes=8 << 20)
    digests = []
    for dtype in DTYPES:
        for shape in ((), (5,), (129,), (40, 33)):
            inputs = [cases.integers(shape, dtype, rank) for rank in range(16)]
            x, _ = cases.placed(comm, inputs[comm.rank], placement)
            y = co.all_reduce(x, group=comm)
            cases.assert_exact(y, cases.reduced(inputs), (dtype, shape))
            digests.append(cases.digest(y))
    comm.close()
    return digests


def test_world_size_16(run_sixteen):
    for placement in PLACEMENTS:
        assert_same_on_all_ranks(run_sixteen(sixteen, placement))
