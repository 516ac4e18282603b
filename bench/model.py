"""The nouns of the benchmark: a case (one op), a problem (one row group), a candidate (one way)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import coconet_ops as co

ALIGNMENT = 64  # bytes, as torch's own allocator


class BenchError(RuntimeError):
    """Something the user can act on; shown without a traceback."""


@dataclass(frozen=True)
class Problem:
    """One op at one size: what every candidate is asked to do."""

    op: str
    dtype: torch.dtype
    layout: str
    count: int  # elements over all ranks: what is reduced, gathered or optimized
    comm: co.Communicator  # a peer's own process has only its rank and world size

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def world(self) -> int:
        return self.comm.world_size

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def shard(self) -> slice:
        """This rank's part of the elements (`count` is a multiple of the world size where used)."""
        size = self.count // self.world
        return slice(self.rank * size, (self.rank + 1) * size)


@dataclass
class Candidate:
    """One way to solve a problem.

    `load` puts fresh inputs in place and isn't timed; `run` is one call of the op and is; `result`
    gives the output of the last call, as consecutive pieces; `reset` takes an op that has state
    back to its start, before the check. `repeat` makes some calls back to back in a loop that is
    faster than Python's.
    """

    name: str
    load: Callable[[], None]
    run: Callable[[], None]
    result: Callable[[], Sequence[Tensor]]
    reset: Callable[[], None] = lambda: None
    peer: str = ""  # empty: coconet itself
    pinned: bool = True  # to the rank's core; else its threads may go to any
    repeat: Callable[[int], None] | None = None
    leeway: float = 1.0  # factor on the check's tolerance, for a library that rounds more

    def sample(self, barrier: Callable[[], None], calls: int) -> tuple[float, float]:
        """Seconds of the first call and of all calls, on this rank, after a barrier."""
        self.load()
        barrier()
        start = time.perf_counter()
        self._call(1)
        first = time.perf_counter() - start
        self._call(calls - 1)
        return first, time.perf_counter() - start

    def _call(self, times: int) -> None:
        if self.repeat:
            self.repeat(times)
        else:
            for _ in range(times):
                self.run()


@dataclass(frozen=True)
class Expected:
    """A correct result: element i is tile[(start + i) % len(tile)], within its tolerance."""

    tile: Tensor  # float64
    tolerance: Tensor  # float64, same shape
    start: int = 0


@dataclass(frozen=True)
class Case:
    """One op: how to run it with coconet, what is correct, and what it costs at least."""

    op: str
    summary: str
    unit: str  # what -b and -e count: "bytes" or "parameters"
    sizes: tuple[int, ...]
    candidates: Callable[[Problem, Buffers], list[Candidate]]
    expected: Callable[[Problem], Expected]
    moved_bytes: Callable[[Problem], float]  # bytes one rank must load and store
    bus_factor: Callable[[int], float]  # busbw / algbw at a world size, as in nccl-tests
    layouts: tuple[str, ...] = ("flat",)
    checked_calls: int = 1

    def count(self, size: int, dtype: torch.dtype, world: int) -> int:
        """Elements for a size in this case's unit; bytes are rounded to equal shards."""
        if self.unit == "parameters":
            return size
        return max(1, size // dtype.itemsize // world) * world


class Buffers:
    """Memory shared by the candidates of all rows: first touch is slow, so it is touched once."""

    def __init__(self, comm: co.Communicator) -> None:
        self._comm = comm
        self._blocks: dict[tuple[str, str], Tensor] = {}

    def private(self, name: str, counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Ordinary tensors of these sizes."""
        return self._tensors("private", name, counts, dtype)

    def heap(self, name: str, counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Tensors in the symmetric heap; collective."""
        return self._tensors("heap", name, counts, dtype)

    def _tensors(
        self, kind: str, name: str, counts: Sequence[int], dtype: torch.dtype
    ) -> list[Tensor]:
        strides = [math.ceil(n * dtype.itemsize / ALIGNMENT) * ALIGNMENT for n in counts]
        block = self._block(kind, name, sum(strides))
        pieces = block[: sum(strides)].split(strides)
        return [p.view(dtype)[:n] for p, n in zip(pieces, counts, strict=True)]

    def _block(self, kind: str, name: str, size: int) -> Tensor:
        block = self._blocks.get((kind, name))
        if block is None or block.numel() < size:
            del block
            self._blocks.pop((kind, name), None)
            empty = self._comm.empty if kind == "heap" else torch.empty
            block = self._blocks[kind, name] = empty(size, dtype=torch.uint8).fill_(0)
        return block
