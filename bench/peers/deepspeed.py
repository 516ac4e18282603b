"""DeepSpeed's CPU parts: the all_reduce through shared memory and CPUAdam."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..cases.rs_adam_ag import HYPERPARAMETERS
from ..check import fill, tile
from ..model import Buffers, Candidate, Problem
from . import INSTALL, Library, Peer
from ._adam import whole_step

FOLDER = Path(sys.prefix, f"peers/deepspeed/torch-{torch.__version__}")
COLLECTIVES, ADAM = "deepspeed_shm_comm", "cpu_adam"


def missing() -> str | None:
    there = all(_path(name).exists() for name in (COLLECTIVES, ADAM))
    return None if there else INSTALL


def runs(problem: Problem) -> bool:
    """Whether it can do the optimizer step; CPUAdam has no fp32 master weights."""
    return missing() is None and problem.dtype == torch.float32


def _path(name: str) -> Path:
    return FOLDER / name / f"{name}.so"


@cache
def _load(name: str) -> ModuleType:
    # without its Python package, which takes seconds to import and changes settings of torch
    spec = importlib.util.spec_from_file_location(name, _path(name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@cache
def all_reduce_of(comm: Library):
    """The in-place sum over these ranks; collective.

    all_reduce(x, calls=1) is compiled by TorchScript: from Python a call takes 3 us more.
    """
    name = type(comm).__name__  # together with the parent's number a name that no other run has
    key = {"MASTER_ADDR": name, "MASTER_PORT": str(os.getppid())}
    with _environment(LOCAL_SIZE=str(comm.world_size), **key):
        _load(COLLECTIVES).initialize(comm.world_size, comm.rank)
    comm.barrier()
    ours = "_".join([str(os.getuid()), *key.values(), str(comm.rank)])
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{ours}").unlink()  # it would stay for ever

    def all_reduce(x: Tensor, calls: int = 1) -> None:
        for _ in range(calls):
            torch.ops.deepspeed.inference_all_reduce_(x)

    return torch.jit.script(all_reduce)


class CPUAdam:
    """The kernel of DeepSpeedCPUAdam, called as that class does."""

    leeway = 4.0  # its bias corrections are fp32
    _ids = itertools.count()

    def __init__(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        self._kernel = _load(ADAM)
        self._id = next(self._ids)
        self._tensors = [
            (p, g, torch.zeros_like(p), torch.zeros_like(p))
            for p, g in zip(parameters, gradients, strict=True)
        ]
        self._step = 0
        betas, eps, decay = (HYPERPARAMETERS[name] for name in ("betas", "eps", "weight_decay"))
        self._settings = (HYPERPARAMETERS["lr"], *betas, eps, decay)
        self._kernel.create_adam(self._id, *self._settings, False, False)

    def reset(self) -> None:
        self._step = 0
        for _, _, *moments in self._tensors:
            torch._foreach_zero_(moments)

    def step(self) -> None:
        self._step += 1
        for tensors in self._tensors:
            self._kernel.adam_update(self._id, self._step, *self._settings, True, *tensors)


def all_reduce(problem: Problem, buffers: Buffers) -> list[Candidate]:
    if problem.dtype != torch.float32 and _load(COLLECTIVES).vector_kernel_level() < 2:
        return []  # its 16-bit kernels need AVX-512
    (x,) = buffers.private("x", [problem.count], problem.dtype)
    values = tile(problem.rank, problem.dtype)
    call = all_reduce_of(problem.comm)
    return [
        Candidate(
            "deepspeed",
            load=lambda: fill([x], values),
            run=lambda: call(x),
            result=lambda: [x],
            repeat=lambda calls: call(x, calls),
        )
    ]


def rs_adam_ag(problem: Problem, buffers: Buffers) -> list[Candidate]:
    if not runs(problem):
        return []
    call = all_reduce_of(problem.comm)
    return [whole_step(problem, buffers, "deepspeed + CPUAdam", call, CPUAdam)]


PEER = Peer(
    name="deepspeed",
    missing=missing,
    factories={"all_reduce": all_reduce, "rs_adam_ag": rs_adam_ag},
)
