"""What this machine can do at best: how fast memory is copied, how far apart two cores are."""

from __future__ import annotations

import os
import statistics
import time

import torch
import torch.distributed as dist

import coconet_ops as co

COPY_BYTES = 64 << 20  # larger than the caches
PASSES = 5
PING_ROUNDS = 100
NEAR_NS = 250


class CopyLimit:
    """GB/s that one process copies while all ranks do; the median over the whole run.

    A copy of n bytes loads n and stores n. Two ways compete: storing past the caches, and torch's
    own copy_.
    """

    def __init__(self, comm: co.Communicator) -> None:
        self._comm = comm
        self._source = torch.empty(COPY_BYTES, dtype=torch.uint8).fill_(1)
        self._target = torch.empty(COPY_BYTES, dtype=torch.uint8).fill_(2)
        self._ways = {
            "non-temporal": lambda: co._C.copy_limit(self._target, self._source),
            "torch copy_": lambda: self._target.copy_(self._source),
        }
        self.gbps: dict[str, list[float]] = {name: [] for name in self._ways}

    def sample(self) -> None:
        """A few passes of each way; collective."""
        for _ in range(PASSES):
            for name, copy in self._ways.items():
                self._comm.barrier()
                start = time.perf_counter()
                copy()
                seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                self.gbps[name].append(COPY_BYTES / seconds.item() / 1e9)

    @property
    def way(self) -> str:
        """The faster way."""
        return max(self.gbps, key=lambda name: statistics.median(self.gbps[name]))

    @property
    def copied(self) -> float:
        """GB/s copied."""
        return statistics.median(self.gbps[self.way])

    @property
    def moved(self) -> float:
        """GB/s loaded and stored."""
        return 2 * self.copied


class Cores:
    """Which core each rank runs on, and how far apart those of ranks 0 and 1 are."""

    def __init__(self, comm: co.Communicator) -> None:
        self._comm = comm
        self._all = os.sched_getaffinity(0)
        local_rank = int(os.environ.get("LOCAL_RANK", comm.rank))
        self.own = {sorted(self._all)[local_rank % len(self._all)]}
        used: list[set[int]] = [set()] * comm.world_size
        dist.all_gather_object(used, self.own)
        self.oversubscribed = len(set().union(*used)) < comm.world_size
        self._pinned: bool | None = None
        self.pin()

    def pin(self, pinned: bool = True) -> None:
        """Keep all threads of this process on its core, or let them go to any."""
        if pinned != self._pinned:
            self._pinned = pinned
            pin_threads(self.own if pinned else self._all)

    def ping(self) -> float:
        """Round trip of a flag in ns; 0 where ranks 0 and 1 have no core each. Collective."""
        if self._comm.world_size == 1 or self.oversubscribed:
            return 0.0
        return self._comm._ping(PING_ROUNDS)


def pin_threads(cores: set[int]) -> None:
    """Keep all threads of this process on these cores."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def placement(ping_ns: list[float]) -> str:
    """Whether the cores of ranks 0 and 1 shared a cache: near, far, or the share that was near."""
    if not any(ping_ns):
        return ""
    near = sum(ns < NEAR_NS for ns in ping_ns) / len(ping_ns)
    return {0.0: "far", 1.0: "near"}.get(near, f"{near:.0%} near")
