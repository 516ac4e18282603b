"""The backend "cuda_peer": ranks in processes of their own, each with a CUDA device, on one host.

Their memory is mapped into each other by one of the providers in :mod:`coconet_ops.peer_memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import _C, peer_memory
from .errors import CommunicatorError

PROVIDERS = ("symmetric", "nccl")
HEAP_BYTES = 1 << 30  # unless given: taken at once
_MOST_BLOCKS = 64  # per rank: enough for the links between devices, which leaves the rest to others

Allocate = Callable[[Any, torch.device, int], peer_memory.PeerMemory]


def connect(
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    heap_bytes: int,
    seconds: float,
    check: bool,
    provider: str,
    exchange: Callable[[object], list],
    backend: _C.Backend | None = None,
    allocate: Allocate | None = None,
) -> _C.DeviceCommunicator:
    """This rank's core. Collective; raises the same CommunicatorError on every rank.

    exchange: gives the values of all ranks. backend, allocate: for tests.
    """
    backend = backend or _C.cuda_backend()
    problem, blocks = "", 0
    try:
        if provider not in PROVIDERS:
            raise ValueError(
                f"peer_memory is {provider!r}; it must be one of {', '.join(PROVIDERS)}"
            )
        count, why = backend.device_count()
        if count == 0:
            raise RuntimeError(why)
        index = device.index or 0
        blocks = min(backend.device_info(index)["multiprocessors"], _MOST_BLOCKS)
    except (RuntimeError, ValueError) as error:
        problem = str(error)
    ranks = exchange((problem, heap_bytes, check, blocks))
    _raise_for_any([text for text, *_ in ranks])
    _agree("heap_bytes", [heap for _, heap, _, _ in ranks])
    _agree("COCONET_CHECK", [checked for _, _, checked, _ in ranks])
    blocks = min(b for _, _, _, b in ranks)  # blocks meet by number

    options = {"device": device, "heap_bytes": heap_bytes, "blocks": blocks}
    nbytes = backend.peer_buffer_bytes(world=len(ranks), **options)
    if allocate is None:
        allocate = {
            "symmetric": peer_memory.allocate,
            "nccl": peer_memory.allocate_nccl,
        }[provider]
    memory = allocate(group, device, nbytes)
    core = None
    try:
        core = backend.peer_communicator(
            rank=memory.rank,
            buffers=memory.pointers,
            owner=memory,
            bytes=memory.nbytes,
            timeout=seconds,
            check=check,
            **options,
        )
    except RuntimeError as error:
        problem = str(error)
    _raise_for_any(exchange(problem))  # no rank launches before all are there
    return core


def _raise_for_any(problems: list[str]) -> None:
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if failed:
        raise CommunicatorError("Communicator: could not be created: " + "; ".join(failed))


def _agree(name: str, values: list) -> None:
    if len(set(values)) > 1:
        raise CommunicatorError(f"Communicator: ranks disagree on {name}: {values}")
