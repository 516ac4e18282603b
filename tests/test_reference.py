"""The unfused versions in coconet_ops.reference mean the same as the fused ones."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import DTYPES, UNFUSED_TOLERANCE
from harness import communicator

import coconet_ops as co

SHAPES = ((1,), (129,), (1023, 7), (3, 5, 7), (4, 0, 3))


def same(fused, unfused, dtype, exact, what):
    assert fused.dtype == unfused.dtype, what
    tolerance = {"rtol": 0, "atol": 0} if exact else UNFUSED_TOLERANCE[dtype]
    cases.assert_close(fused, unfused.double(), tolerance, what)


def collectives(dtype):
    comm = communicator()
    for seed, shape in enumerate(SHAPES):
        for make in (cases.integers, cases.normals):
            exact = make is cases.integers
            own = make(shape, dtype, comm.rank, seed)
            x, _ = cases.placed(comm, own, "heap")
            for op in ("sum", "avg"):
                what = (make.__name__, shape, op)
                if op == "avg":
                    exact = False
                unfused = co.reference.all_reduce(own, op=op)
                same(co.all_reduce(x, op=op, group=comm), unfused, dtype, exact, what)
                in_place = own.clone()
                assert co.reference.all_reduce_(in_place, op=op) is in_place
                assert torch.equal(in_place, unfused), what
                for dim in range(-1, len(shape)):
                    for split in ("tensor_split", "chunk"):
                        options = {"dim": dim, "op": op, "split": split}
                        same(
                            co.reduce_scatter(x, group=comm, **options),
                            co.reference.reduce_scatter(own, **options),
                            dtype,
                            exact,
                            (*what, options),
                        )
            for dim in range(-1, len(shape)):
                uneven = own.narrow(dim, 0, shape[dim] // (comm.rank + 1))
                for shard, size in ((own, shape[dim] * comm.world_size), (uneven, None)):
                    fused = co.all_gather(shard, dim=dim, size=size, group=comm)
                    unfused = co.reference.all_gather(shard, dim=dim, size=size)
                    assert fused.shape == unfused.shape, (shape, dim, size)
                    assert cases.bits(fused) == cases.bits(unfused), (shape, dim, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=cases.name)
def test_collectives(run, dtype):
    run(collectives, dtype)


def rs_adam_ag(dtype, adam_w_mode, average_grads):
    comm = communicator()
    shapes = ((3, 5, 7), (), (0,), (1134,), (129, 3))
    start = [cases.normals(shape, dtype, 0, seed) for seed, shape in enumerate(shapes)]
    fused, unfused = ([p.clone() for p in start] for _ in range(2))
    state = co.AdamState(fused, group=comm)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizer = kind(unfused, lr=1e-2, weight_decay=0.125)
    for step in range(10):
        grads = [
            cases.gradient(shape, dtype, comm.rank, 100 * step + index)
            for index, shape in enumerate(shapes)
        ]
        if step % 2:
            grads[3] = None
        if comm.rank == 1:
            grads[4] = None
        co.reference.rs_adam_ag_(unfused, grads, optimizer, average_grads=average_grads)
        co.rs_adam_ag_(
            fused,
            grads,
            state,
            lr=1e-2,
            weight_decay=0.125,
            adam_w_mode=adam_w_mode,
            average_grads=average_grads,
        )
    for index, (one, other) in enumerate(zip(fused, unfused, strict=True)):
        same(one, other, dtype, False, f"parameter {index}")


@pytest.mark.parametrize("average_grads", [True, False], ids=["average", "sum"])
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["AdamW", "Adam"])
def test_rs_adam_ag(run, adam_w_mode, average_grads):
    run(rs_adam_ag, torch.float32, adam_w_mode, average_grads)
