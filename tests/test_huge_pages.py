"""The heap in huge pages of the system's pool, where it has any.

As root: `sysctl vm.nr_hugepages=64` before, and 0 after.
"""

from __future__ import annotations

from pathlib import Path

import harness
import pytest
import torch
from harness import run_fresh, values

import coconet_ops as co

HEAP_BYTES = 16 << 20


def _free_pages() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("HugePages_Free:"))


def _collectives(heap_bytes) -> bool:
    with co.Communicator(heap_bytes=heap_bytes, timeout=harness.TIMEOUT) as comm:
        x = comm.empty(1_000_000).fill_(comm.rank + 1)
        assert torch.equal(co.all_reduce(x, group=comm), torch.full((1_000_000,), 3.0))
        private = torch.full((300_000,), 1.0)
        assert torch.equal(co.all_reduce(private, group=comm), torch.full((300_000,), 2.0))
        return comm.huge_pages


def test_the_heap_takes_huge_pages_from_the_pool():
    free = _free_pages()
    if free < 48:
        pytest.skip(f"{free} huge pages are free (vm.nr_hugepages)")
    assert values(run_fresh(2, _collectives, HEAP_BYTES)) == [True, True]
    assert _free_pages() == free


def test_a_heap_larger_than_the_pool_takes_ordinary_pages():
    larger = (_free_pages() + 1) * (2 << 20)
    assert values(run_fresh(2, _collectives, max(larger, HEAP_BYTES))) == [False, False]
