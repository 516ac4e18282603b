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


def _pieces(x: torch.Tensor, start: int, pattern: torch.Tensor):
    """Pieces of x, and what they should hold if x were elements start, start + 1, ... of the
    periodic pattern."""
    for at in range(0, x.numel(), PERIOD):
        piece = x[at : at + PERIOD]
        phase = (start + at) % PERIOD
        yield at, piece, pattern[phase : phase + piece.numel()]


def _fill(x: torch.Tensor, add: int) -> None:
    for _, piece, wanted in _pieces(x, 0, (TILE + add).to(x.dtype)):
        piece.copy_(wanted)


def _check(x: torch.Tensor, start: int, times: int, add: int) -> None:
    for at, piece, wanted in _pieces(x, start, (times * TILE + add).to(x.dtype)):
        # As bytes, in numpy: several times faster than torch.equal here.
        same = piece.view(torch.uint8).numpy() == wanted.view(torch.uint8).numpy()
        assert same.all(), f"element {at + same.argmin() // x.itemsize}"


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
