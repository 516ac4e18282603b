"""reduce_scatter: rank r gets the r-th part, along dim, of the sum or average over the ranks."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import DTYPES, PLACEMENTS, REDUCE_DTYPES, SHAPES, TOLERANCE
from harness import communicator, new_communicator

import coconet_ops as co

pytestmark = pytest.mark.backends("local", "emulated", "cuda")


def part(x, split, dim, rank, world_size):
    """The oracle: torch.tensor_split, or torch.chunk with empty parts for the last ranks."""
    if split == "tensor_split":
        return x.tensor_split(world_size, dim)[rank]
    parts = x.chunk(world_size, dim)
    return parts[rank] if rank < len(parts) else x.narrow(dim, x.shape[dim], 0)


def every_shape_dim_and_layout(dtype, placement, split):
    comm = communicator()
    rank, world = comm.rank, comm.world_size
    for seed, shape in enumerate(shape for shape in SHAPES if shape):
        for layout in cases.layouts(shape):
            for make in (cases.integers, cases.normals):
                inputs = [make(shape, dtype, other, seed) for other in range(world)]
                x, buffer = cases.placed(comm, inputs[rank], placement, layout)
                before = cases.bits(buffer)
                expected = cases.reduced(inputs)
                for dim in range(len(shape)):
                    what = (make.__name__, shape, layout, dim)
                    mine = part(expected, split, dim, rank, world)
                    cases.poison(comm, expected.numel() // world * dtype.itemsize)
                    y = co.reduce_scatter(x, dim=dim, split=split, group=comm)
                    assert y.dtype == dtype
                    if make is cases.integers:
                        cases.assert_exact(y, mine, what)
                    else:
                        cases.assert_close(y, mine, TOLERANCE[dtype], what)
                    if x.is_contiguous() and y.numel() and placement != "mixed":
                        assert comm.owns(y) == (placement == "heap"), what
                    assert cases.bits(buffer) == before, f"{what}: the input changed"
                    again = co.reduce_scatter(x, dim=dim - len(shape), split=split, group=comm)
                    assert cases.bits(again) == cases.bits(y), what


@pytest.mark.parametrize("split", ["tensor_split", "chunk"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", REDUCE_DTYPES, ids=cases.name)
def test_equals_float64_for_any_shape_dim_and_layout(run, dtype, placement, split):
    run(every_shape_dim_and_layout, dtype, placement, split)


def is_part_of_all_reduce(dtype):
    comm = communicator()
    for shape in ((1134,), (1023, 7), (33, 65, 5)):
        own = cases.normals(shape, dtype, comm.rank)
        whole = co.all_reduce(own, group=comm)
        for placement in PLACEMENTS:
            x, _ = cases.placed(comm, own, placement)
            for split in ("tensor_split", "chunk"):
                for dim in range(len(shape)):
                    y = co.reduce_scatter(x, dim=dim, split=split, group=comm)
                    mine = part(whole, split, dim, comm.rank, comm.world_size)
                    assert cases.bits(y) == cases.bits(mine), (shape, placement, split, dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_bits_are_those_of_all_reduce_for_any_placement(run, dtype):
    run(is_part_of_all_reduce, dtype)


def few_rows(split):
    comm = communicator()
    rank, world = comm.rank, comm.world_size
    sizes = []
    for rows in range(12):
        x = torch.arange(rows * 3.0).view(rows, 3) + rank
        y = co.reduce_scatter(x, split=split, group=comm)
        total = torch.arange(rows * 3.0).view(rows, 3) * world + world * (world - 1) / 2
        cases.assert_exact(y, part(total, split, 0, rank, world), rows)
        sizes.append(len(y))
    return sizes


def test_tensor_split_gives_the_first_ranks_one_row_more(on_ranks):
    sizes = on_ranks.run(5, few_rows, "tensor_split")
    assert [by_rank[7] for by_rank in sizes] == [2, 2, 1, 1, 1]
    assert [by_rank[3] for by_rank in sizes] == [1, 1, 1, 0, 0]


def test_chunk_may_leave_the_last_ranks_without_rows(on_ranks):
    sizes = on_ranks.run(5, few_rows, "chunk")
    assert [by_rank[7] for by_rank in sizes] == [2, 2, 2, 1, 0]
    assert [by_rank[6] for by_rank in sizes] == [2, 2, 2, 0, 0]


def average():
    comm = communicator()
    for placement in PLACEMENTS:
        x, _ = cases.placed(comm, torch.arange(10.0) * comm.world_size + comm.rank, placement)
        y = co.reduce_scatter(x, op="avg", group=comm)
        expected = torch.arange(10.0) * comm.world_size + (comm.world_size - 1) / 2
        cases.assert_close(
            y,
            expected.tensor_split(comm.world_size)[comm.rank],
            TOLERANCE[torch.float32],
            placement,
        )


def test_average(run):
    run(average)


def large(dtype, placement):
    comm = communicator()
    world = comm.world_size
    index = torch.arange(cases.LARGER_THAN_STAGING)
    x, _ = cases.placed(comm, (index % 23 - 11 + comm.rank).to(dtype), placement)
    expected = ((index % 23 - 11) * world + world * (world - 1) // 2).to(dtype)
    cases.poison(comm, x.nbytes // world)
    y = co.reduce_scatter(x, group=comm)
    assert torch.equal(y, expected.tensor_split(world)[comm.rank])
    x, expected = x[:-1].view(-1, 3000), expected[:-1].view(-1, 3000)
    y = co.reduce_scatter(x, dim=1, group=comm)
    assert torch.equal(y, expected.tensor_split(world, 1)[comm.rank])


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_tensors_larger_than_the_staging_chunks(run_few, dtype, placement):
    run_few(large, dtype, placement)


def sixteen():
    comm = new_communicator(heap_bytes=8 << 20)
    for placement in PLACEMENTS:
        for shape in ((5,), (40, 33), (16, 3)):
            inputs = [cases.integers(shape, torch.float32, rank) for rank in range(16)]
            x, _ = cases.placed(comm, inputs[comm.rank], placement)
            for split in ("tensor_split", "chunk"):
                y = co.reduce_scatter(x, split=split, group=comm)
                mine = part(cases.reduced(inputs), split, 0, comm.rank, 16)
                cases.assert_exact(y, mine, (placement, shape, split))
    comm.close()


def test_world_size_16(run_sixteen):
    run_sixteen(sixteen)
