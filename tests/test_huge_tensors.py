"""Tensors of more than 2^31 elements."""

from __future__ import annotations

import harness
import torch
from harness import run_fresh, values

import coconet_ops as co

ROWS, COLUMNS = 2**21 + 3, 1024
assert ROWS * COLUMNS > 2**31
PERIOD = 2**20 + 7
TILE = (torch.arange(2 * PERIOD) % PERIOD % 61).to(torch.bfloat16)  # two periods


def _pieces(start: int, numel: int):
    """Elements [start, start + numel) of the periodic pattern: (place, values), piece by piece."""
    for at in range(0, numel, PERIOD):
        phase = (start + at) % PERIOD
        yield slice(at, min(at + PERIOD, numel)), TILE[phase : phase + min(PERIOD, numel - at)]


def _fill(x: torch.Tensor, add: int) -> None:
    for place, values in _pieces(0, x.numel()):
        x[place] = values + add


def _check(x: torch.Tensor, start: int, times: int, add: int) -> None:
    for place, values in _pieces(start, x.numel()):
        expected = (times * values + add).to(x.dtype)
        if not torch.equal(x[place], expected):
            wrong = (x[place] != expected).nonzero()[0].item()
            raise AssertionError(f"element {place.start + wrong}")


def _ops() -> None:
    with co.Communicator(heap_bytes=12 << 30, timeout=harness.TIMEOUT) as comm:
        x = comm.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
        _fill(x.view(-1), add=comm.rank)
        shard = co.reduce_scatter(x, group=comm)
        begin = (ROWS + 1) // 2 * COLUMNS if comm.rank else 0
        _check(shard.view(-1), begin, times=2, add=1)
        del shard
        co.all_reduce_(x, group=comm)
        _check(x.view(-1), 0, times=2, add=1)

        # The same memory as shards of bytes, together longer than 2^31.
        shard = x.view(-1).view(torch.uint8)[: 2**30 + comm.rank]
        _fill(shard, add=100 * comm.rank)
        y = co.all_gather(shard, group=comm)
        assert y.numel() == 2**31 + 1
        _check(y[: 2**30], 0, times=1, add=0)
        _check(y[2**30 :], 0, times=1, add=100)


def test_more_than_2_31_elements():
    values(run_fresh(2, _ops))
