"""Long random sequences of calls: good and bad ones, sizes, places and delays in any order."""

from __future__ import annotations

import random
import time

import cases
import pytest
import torch
from cases import DTYPES, Adam64
from harness import assert_same_on_all_ranks, new_communicator

import coconet_ops as co

pytestmark = pytest.mark.backends("local", "emulated", "cuda")


class Sequence:
    """The same choices on all ranks (`shared`), and some that each rank makes alone (`own`)."""

    def __init__(self, seed: int) -> None:
        self.comm = new_communicator(heap_bytes=32 << 20)
        self.rank, self.world = self.comm.rank, self.comm.world_size
        self.shared = random.Random(seed)
        self.own = random.Random(1000 * seed + self.rank)
        self.held: list[torch.Tensor] = []
        self.digests: list[str] = []
        self.params = [
            cases.normals(shape, torch.float32, 0, seed)
            for seed, shape in enumerate([(1000,), (3, 5), (40_000,)])
        ]
        self.oracle = Adam64(self.params)
        self.state = co.AdamState(self.params, group=self.comm)

    def inputs(self, shape):
        dtype, seed = self.shared.choice(DTYPES), self.shared.randrange(10**6)
        inputs = [cases.integers(shape, dtype, rank, seed) for rank in range(self.world)]
        return inputs, cases.placed(self.comm, inputs[self.rank], self.placement())[0]

    def placement(self):
        return self.shared.choice(cases.PLACEMENTS)

    def shape(self):
        rows = self.shared.choice([1, 7, 100, 5000, 100_000])
        return (self.shared.randrange(rows + 1), self.shared.choice([1, 3]))

    def keep(self, y, expected, what):
        cases.assert_exact(y, expected, what)
        if what != "reduce_scatter":  # whose results differ between ranks
            self.digests.append(cases.digest(y))
        if self.own.random() < 0.3:
            self.held.append(y)
        self.own.shuffle(self.held)
        del self.held[20:]

    def all_reduce(self):
        inputs, x = self.inputs(self.shape())
        if self.shared.random() < 0.5:
            y = co.all_reduce(x, group=self.comm)
        else:
            y = co.all_reduce_(x, group=self.comm)
        self.keep(y, cases.reduced(inputs), "all_reduce")

    def reduce_scatter(self):
        inputs, x = self.inputs(self.shape())
        dim = self.shared.randrange(2)
        y = co.reduce_scatter(x, dim=dim, group=self.comm)
        total = cases.reduced(inputs).tensor_split(self.world, dim)[self.rank]
        self.keep(y, total, "reduce_scatter")

    def all_gather(self):
        inputs, x = self.inputs(self.shape())
        dim = self.shared.randrange(2)
        y = co.all_gather(x, dim=dim, group=self.comm)
        self.keep(y, torch.cat(inputs, dim).double(), "all_gather")

    def adam(self):
        seed = self.shared.randrange(10**6)
        own, averages = [], []
        for index, p in enumerate(self.params):
            by_rank = [
                cases.gradient(p.shape, p.dtype, rank, seed + index) for rank in range(self.world)
            ]
            own.append(by_rank[self.rank])
            averages.append(cases.reduced(by_rank, "avg"))
        co.rs_adam_ag_(self.params, own, self.state, lr=1e-3)
        self.oracle.step(averages, lr=1e-3)
        for p, expected in zip(self.params, self.oracle.params, strict=True):
            cases.assert_close(p, expected.detach(), cases.OPTIMIZER_TOLERANCE, "adam")

    def barrier(self):
        self.comm.barrier()

    def disagree(self):
        shape = (3 + (self.rank == self.shared.randrange(self.world)),)
        with pytest.raises(co.MismatchError):
            co.all_reduce(torch.ones(shape), group=self.comm)

    def reject(self):
        bad = {self.shared.randrange(self.world) for _ in range(2)}
        for _ in range(self.shared.randrange(1, 4)):
            with pytest.raises(TypeError if self.rank in bad else co.MismatchError):
                dtype = torch.int16 if self.rank in bad else torch.float32
                co.all_reduce(torch.ones(3, dtype=dtype), group=self.comm)

    def run(self, count):
        calls = [self.all_reduce, self.reduce_scatter, self.all_gather, self.adam, self.barrier]
        if self.world > 1:
            calls += [self.disagree, self.reject]
        for _ in range(count):
            if self.own.random() < 0.2:
                time.sleep(self.own.random() / 200)
            self.shared.choice(calls)()
        self.comm.close()
        return self.digests


def sequence(seed, count):
    return Sequence(seed).run(count)


@pytest.mark.parametrize("seed", range(3))
def test_random_sequences_of_calls(run, seed):
    assert_same_on_all_ranks(run(sequence, seed, 150))
