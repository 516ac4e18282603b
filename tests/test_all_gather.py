"""all_gather: the shards of all ranks, joined along dim, on every rank."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import PLACEMENTS
from harness import assert_same_on_all_ranks, communicator, new_communicator

import coconet_ops as co

pytestmark = pytest.mark.backends("local", "emulated", "cuda")

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)


def shard(shape, dtype, rank, seed):
    """Any bits at all: an all-gather moves data and knows no numbers."""
    generator = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        x = torch.randint(2, tuple(shape), generator=generator, device="cpu").bool()
        return x.to(torch.get_default_device())
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator, device="cpu")
    raw = raw.to(torch.get_default_device())
    return raw.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


SIZES = {
    "even": lambda rank: 3,
    "uneven": lambda rank: (2 * rank + 1) % 5,
    "one rank has none": lambda rank: 0 if rank == 0 else 4,
    "one rank has all": lambda rank: 7 if rank == 0 else 0,
    "none": lambda rank: 0,
}
AROUND = ((), (7,), (3, 5), (2, 0))  # the other dimensions


def every_shape_dim_and_layout(dtype, placement):
    comm = communicator()
    digests = {}
    for seed, (around, (sizes, size)) in enumerate(cases.product(AROUND, SIZES.items())):
        for dim in range(len(around) + 1):
            shapes = [(*around[:dim], size(rank), *around[dim:]) for rank in range(comm.world_size)]
            shards = [shard(shape, dtype, rank, seed) for rank, shape in enumerate(shapes)]
            expected = torch.cat(shards, dim)
            for layout in cases.layouts(shapes[0]):
                what = (around, sizes, dim, layout)
                most = max(cases.room(shape, layout) for shape in shapes)
                x, buffer = cases.placed(comm, shards[comm.rank], placement, layout, most)
                before = cases.bits(buffer)
                cases.poison(comm, expected.nbytes)
                y = co.all_gather(x, dim=dim, group=comm)
                assert y.shape == expected.shape and y.dtype == dtype, (what, y.shape)
                assert cases.bits(y) == cases.bits(expected), what
                assert cases.bits(buffer) == before, f"{what}: the input changed"
                zero_copy = layout in ("contiguous", "misaligned") and all(
                    part.numel() for part in shards
                )
                if zero_copy and placement != "mixed":
                    assert comm.owns(y) == (placement == "heap"), what
                y = co.all_gather(x, dim=dim - len(shapes[0]), size=expected.shape[dim], group=comm)
                assert cases.bits(y) == cases.bits(expected), what
                digests[what] = cases.digest(y)
    return digests


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex128], ids=cases.name)
def test_joins_the_shards_bit_for_bit(run, dtype, placement):
    assert_same_on_all_ranks(run(every_shape_dim_and_layout, dtype, placement))


def every_dtype(placement):
    comm = communicator()
    for seed, dtype in enumerate(DTYPES):
        for sizes, size in SIZES.items():
            for dim in range(2):
                shapes = [(3, size(rank))[:: 1 if dim else -1] for rank in range(comm.world_size)]
                shards = [shard(shape, dtype, rank, seed) for rank, shape in enumerate(shapes)]
                most = max(part.numel() for part in shards)
                x, _ = cases.placed(comm, shards[comm.rank], placement, most=most)
                y = co.all_gather(x, dim=dim, group=comm)
                assert y.dtype == dtype
                assert cases.bits(y) == cases.bits(torch.cat(shards, dim)), (dtype, sizes, dim)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_any_dtype(run, placement):
    run(every_dtype, placement)


def undoes_reduce_scatter():
    comm = communicator()
    for shape in ((1134,), (7, 5), (3, 2, 65)):
        for placement in PLACEMENTS:
            x, _ = cases.placed(comm, cases.normals(shape, torch.float32, comm.rank), placement)
            whole = co.all_reduce(x, group=comm)
            for split in ("tensor_split", "chunk"):
                for dim in range(len(shape)):
                    mine = co.reduce_scatter(x, dim=dim, split=split, group=comm)
                    again = co.all_gather(mine, dim=dim, size=shape[dim], group=comm)
                    assert torch.equal(again, whole), (shape, placement, split, dim)


def test_of_reduce_scatter_is_all_reduce(run):
    run(undoes_reduce_scatter)


def large(placement):
    comm = communicator()
    rows = cases.LARGER_THAN_STAGING // 3
    own = torch.arange(rows * 3).view(3, rows)[:, : rows - comm.rank] + comm.rank
    x, _ = cases.placed(comm, own.float(), placement, most=3 * rows)
    y = co.all_gather(x, dim=1, group=comm)
    parts = y.split([rows - rank for rank in range(comm.world_size)], 1)
    for rank, got in enumerate(parts):
        expected = torch.arange(rows * 3).view(3, rows)[:, : rows - rank] + rank
        assert torch.equal(got, expected.float()), rank


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tensors_larger_than_the_staging_chunks(run_few, placement):
    run_few(large, placement)


def wrong_size():
    comm = communicator()
    for placement in PLACEMENTS:
        x, _ = cases.placed(comm, torch.ones(3, 2), placement)
        for size in (0, 3 * comm.world_size + 1, 2**40):
            with pytest.raises((ValueError, co.MismatchError), match=f"size.*{size}"):
                co.all_gather(x, size=size, group=comm)
        assert len(co.all_gather(x, size=3 * comm.world_size, group=comm)) == 3 * comm.world_size


def test_size_is_checked_against_the_shards(run_few):
    run_few(wrong_size)


def lazy_views():
    comm = communicator()
    z = torch.complex(torch.arange(5.0), torch.arange(5.0) + comm.rank)
    y = co.all_gather(z.conj(), group=comm)
    expected = [
        torch.complex(torch.arange(5.0), -torch.arange(5.0) - rank)
        for rank in range(comm.world_size)
    ]
    assert torch.equal(y, torch.cat(expected))
    y = co.all_gather(torch.full((1,), comm.rank).expand(3), group=comm)
    assert y.tolist() == [rank for rank in range(comm.world_size) for _ in range(3)]


def test_conjugated_and_expanded_views(run_few):
    run_few(lazy_views)


def sixteen():
    comm = new_communicator(heap_bytes=8 << 20)
    for placement in PLACEMENTS:
        own = torch.full((comm.rank % 3, 5), comm.rank)
        x, _ = cases.placed(comm, own, placement, most=10)
        y = co.all_gather(x, group=comm)
        assert y[:, 0].tolist() == [rank for rank in range(16) for _ in range(rank % 3)]
    comm.close()


def test_world_size_16(run_sixteen):
    run_sixteen(sixteen)
