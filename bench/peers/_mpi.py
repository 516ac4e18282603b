"""MPI, the parts that its implementations share. The calls are in mpi_loop.c.

An implementation lies in `peers/NAME` of the Python environment, so that several can be there.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..check import fill, tile
from ..model import BenchError, Buffers, Candidate, Problem
from . import INSTALL, Peer, deepspeed
from ._adam import slice_step, whole_step


class Mpi:
    """One implementation; a `Library`."""

    def __init__(
        self,
        name: str,
        options: list[str],
        environment: Mapping[str, str],
        yielding: Mapping[str, str],
    ) -> None:
        """options: of mpiexec; yielding: the environment where ranks share cores."""
        self._name = name
        self._folder = Path(sys.prefix, "peers", name)
        self._options = options
        self._environment = environment
        self._yielding = yielding

    @property
    def peer(self) -> Peer:
        return Peer(
            name=self._name,
            missing=lambda: None if self._loop.exists() else INSTALL,
            factories={
                "all_reduce": self._all_reduce,
                "reduce_scatter": self._reduce_scatter,
                "all_gather": self._all_gather,
                "rs_adam_ag": self._rs_adam_ag,
            },
            library=self,
        )

    def launcher(self, ranks: int, oversubscribed: bool) -> tuple[list[str], dict[str, str]]:
        command = [str(self._folder / "bin/mpiexec"), *self._options, "-n", str(ranks)]
        yielding = self._yielding if oversubscribed else {}
        return command, {**self._environment, **yielding}

    def start(self) -> None:
        self._mpi = ctypes.CDLL(str(self._loop))
        rank, world = ctypes.c_int(), ctypes.c_int()
        self._call("start", ctypes.byref(rank), ctypes.byref(world))
        self.rank, self.world_size = rank.value, world.value

    def barrier(self) -> None:
        self._call("barrier")

    def finish(self) -> None:
        self._call("finish")

    @property
    def _loop(self) -> Path:
        return self._folder / "lib/libcoconet_mpi.so"

    def _call(self, function: str, *arguments: object) -> None:
        if code := getattr(self._mpi, function)(*arguments):
            raise BenchError(f"{self._name}: {function} failed with code {code}")

    def _all_reduce_(self, x: Tensor, calls: int = 1) -> None:
        self._call("all_reduce", _address(x), x.numel(), _dtype(x), calls)

    def _reduce_scatter_(self, x: Tensor, shard: Tensor, calls: int = 1) -> None:
        self._call("reduce_scatter", _address(x), _address(shard), shard.numel(), _dtype(x), calls)

    def _all_gather_(self, x: Tensor, shard: Tensor | None = None, calls: int = 1) -> None:
        count = x.numel() // self.world_size
        source = None if shard is None else _address(shard)
        self._call("all_gather", source, _address(x), count, x.itemsize, calls)

    def _sums(self, problem: Problem) -> bool:
        return bool(self._mpi.sums(_name(problem.dtype)))

    def _all_reduce(self, problem: Problem, buffers: Buffers) -> list[Candidate]:
        if not self._sums(problem):
            return []
        (x,) = buffers.private("x", [problem.count], problem.dtype)
        values = tile(problem.rank, problem.dtype)

        def repeat(calls: int) -> None:
            self._all_reduce_(x, calls)

        return [_looped(self._name, lambda: fill([x], values), repeat, lambda: [x])]

    def _reduce_scatter(self, problem: Problem, buffers: Buffers) -> list[Candidate]:
        if not self._sums(problem):
            return []
        (x,) = buffers.private("x", [problem.count], problem.dtype)
        (out,) = buffers.private("shard", [problem.count // problem.world], problem.dtype)
        values = tile(problem.rank, problem.dtype)

        def load() -> None:
            fill([x], values)

        def scatter(calls: int) -> None:
            self._reduce_scatter_(x, out, calls)

        def reduce(calls: int) -> None:
            self._all_reduce_(x, calls)

        return [
            _looped(f"{self._name} reduce_scatter", load, scatter, lambda: [out]),
            _looped(f"{self._name} all_reduce", load, reduce, lambda: [x[problem.shard]]),
        ]

    def _all_gather(self, problem: Problem, buffers: Buffers) -> list[Candidate]:
        (x,) = buffers.private("shard", [problem.count // problem.world], problem.dtype)
        (out,) = buffers.private("x", [problem.count], problem.dtype)
        values = tile(0, problem.dtype)

        def repeat(calls: int) -> None:
            self._all_gather_(out, x, calls)

        return [
            _looped(
                self._name,
                lambda: fill([x], values, problem.shard.start),
                repeat,
                lambda: [out],
            )
        ]

    def _rs_adam_ag(self, problem: Problem, buffers: Buffers) -> list[Candidate]:
        name = self._name
        found = []
        if self._sums(problem):
            found += [
                whole_step(problem, buffers, f"{name} + Adam(fused)", self._all_reduce_),
                slice_step(
                    problem,
                    buffers,
                    f"{name} RS + Adam slice + AG",
                    self._reduce_scatter_,
                    self._all_gather_,
                ),
            ]
        if deepspeed.runs(problem):
            all_reduce = deepspeed.all_reduce_of(self)
            found.append(
                slice_step(
                    problem,
                    buffers,
                    f"deepspeed + CPUAdam slice, {name} AG",
                    lambda flat, _: all_reduce(flat),
                    self._all_gather_,
                    deepspeed.CPUAdam,
                    in_place=True,
                )
            )
        return found


def _looped(name, load, repeat, result) -> Candidate:
    return Candidate(name, load, lambda: repeat(1), result, repeat=repeat)


def _address(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _dtype(x: Tensor) -> bytes:
    return _name(x.dtype)


def _name(dtype: object) -> bytes:
    return str(dtype).removeprefix("torch.").encode()
