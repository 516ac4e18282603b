"""Device memory of every rank, mapped into every rank: what the CUDA kernels communicate through.

Two providers give the same :class:`PeerMemory`: torch's symmetric memory (:func:`allocate`) and
NCCL's windows (:func:`allocate_nccl`). Both are collective, and whatever fails on one rank raises
the same :class:`CommunicatorError` on all of them.

This is the only module that touches ``torch.distributed._symmetric_memory``, which is private to
torch and changes. What is used of it, by version of torch:

====  ========================================================================================
2.6   ``_SymmetricMemory.empty_strided_p2p`` without a group, ``rendezvous(tensor, group)``, and a
      handle with ``rank``, ``world_size``, ``buffer_size``, ``buffer_ptrs``,
      ``barrier(channel, timeout_ms)``: all that is needed.
2.9   ``empty`` takes memory from a pool, from which each rank reuses blocks in an order of its own,
      and ``buffer_ptrs`` are those of the pool's segment. So ``empty_strided_p2p`` is called here:
      one allocation per tensor in every version.
2.11  ``enable_symm_mem_for_group`` is deprecated. Before, ``rendezvous`` called it itself, so it
      never has to be called here.
====  ========================================================================================
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from .errors import CommunicatorError

KNOWN_TORCH = "2.6 to 2.13"
MAX_RANKS = 16
ALIGNMENT = 256  # of every rank's buffer, in bytes

_START_TIMEOUT_MS = 60_000  # torch's barrier kills the CUDA context when it is over


@dataclass(frozen=True)
class PeerMemory:
    """One buffer per rank of a group, all of them mapped into this process. Lives as long as this
    object; a peer's mapping of it lives as long as the peer's.

    Attributes:
        device: index of this rank's CUDA device.
        rank, world_size: this rank's place in the group.
        nbytes: size of each rank's buffer in bytes.
        pointers: address of every rank's buffer as this rank's device sees it, rank 0 first. Each
            is a multiple of 256.
    """

    device: int
    rank: int
    world_size: int
    nbytes: int
    pointers: list[int]
    _barrier: Callable[[], None] = field(repr=False)
    _owner: object = field(repr=False)  # whatever keeps the memory mapped

    def barrier(self) -> None:
        """Enqueues a barrier of all ranks on the device's current stream: what a rank wrote to any
        buffer before it, every rank sees after it. On one stream at a time. It waits for as long as
        it takes: for starting and ending; kernels bring signals of their own."""
        self._barrier()


def allocate(
    group: dist.ProcessGroup | None, device: torch.device | int | str, nbytes: int
) -> PeerMemory:
    """A symmetric buffer of nbytes per rank from ``torch.distributed._symmetric_memory``; all of
    them are zero before any rank returns. Collective.

    Kernels lay out their own signals inside the buffer. torch's signal pads are small (2 KiB in
    torch 2.6, 9 KiB in 2.13, unless set otherwise), and torch's own ops count on finding zeros in
    them. So they serve only the handle's barrier, once at the start. It writes to every peer: one
    that can't be reached shows up here, not in the first kernel.

    Args:
        group: a process group, None for the default group; 1 to 16 ranks, each with a device of its
            own.
        device: this rank's CUDA device.
        nbytes: size of each rank's buffer, equal on all ranks.

    Raises:
        CommunicatorError: on every rank: this torch lacks something that is needed, there is no
            CUDA, ranks share a device or disagree on nbytes, or torch can't connect them (its own
            exception is the cause on the ranks that had it).
    """
    ranks = _Ranks("symmetric memory", group)
    place, module = ranks.together(
        "setting up", lambda: (_place(device, nbytes, ranks), _symmetric_memory())
    )
    _agree(ranks, place, told_by_index=True)
    device = place.index
    tensor = ranks.together(
        f"allocating {nbytes} bytes",
        lambda: module._SymmetricMemory.empty_strided_p2p(
            (nbytes,), (1,), torch.uint8, torch.device("cuda", device)
        ),
    )

    def connect() -> tuple[Any, list[int]]:
        handle = module.rendezvous(tensor, ranks.group)
        pointers = _pointers(handle, tensor, ranks)
        tensor.zero_()
        torch.cuda.synchronize(device)
        return handle, pointers

    def meet() -> None:
        handle.barrier(channel=0, timeout_ms=_START_TIMEOUT_MS)
        torch.cuda.synchronize(device)

    handle, pointers = ranks.together("rendezvous", connect)
    ranks.together("first barrier", meet)
    return PeerMemory(
        device=device,
        rank=ranks.rank,
        world_size=ranks.world_size,
        nbytes=nbytes,
        pointers=pointers,
        _barrier=lambda: handle.barrier(channel=0),
        _owner=(tensor, handle),
    )


def allocate_nccl(
    group: dist.ProcessGroup | None, device: torch.device | int | str, nbytes: int
) -> PeerMemory:
    """Like :func:`allocate`, from windows of NCCL's device API instead. Collective.

    Needs an extension that was built with NCCL's headers, and ``libnccl.so.2`` at run time: the one
    that torch has loaded, if it has.

    Raises:
        CommunicatorError: on every rank: built without NCCL, NCCL isn't there or has another
            version, there is no CUDA, ranks share a device or disagree on nbytes, some ranks can't
            reach each other by load and store, or a call of NCCL's failed.
    """
    from . import _C

    ranks = _Ranks("NCCL", group)
    place = ranks.together("setting up", lambda: _place(device, nbytes, ranks))
    _agree(ranks, place)
    device = place.index
    # Each step is local or collective as a whole, so that no rank enters what a peer never will.
    peers, meeting = ranks.together(
        f"allocating {nbytes} bytes",
        lambda: (
            _C.NcclPeers(device, nbytes),
            _C.NcclPeers.new_meeting() if ranks.rank == 0 else b"",
        ),
    )
    meeting = ranks.exchange(meeting)[0]
    ranks.together("connecting", lambda: peers.connect(meeting, ranks.rank, ranks.world_size))
    ranks.together("mapping", peers.map)

    def barrier() -> None:
        peers.barrier(torch.cuda.current_stream(device).cuda_stream)

    def meet() -> None:
        barrier()
        torch.cuda.synchronize(device)

    ranks.together("first barrier", meet)
    return PeerMemory(
        device=device,
        rank=ranks.rank,
        world_size=ranks.world_size,
        nbytes=nbytes,
        pointers=peers.pointers,
        _barrier=barrier,
        _owner=peers,
    )


class _Ranks:
    """The ranks that allocate together. They meet at every step: all pass it, or all raise."""

    def __init__(self, provider: str, group: dist.ProcessGroup | None) -> None:
        self.provider = provider
        self.group = dist.group.WORLD if group is None else group
        self.rank: int = dist.get_rank(self.group)
        self.world_size: int = dist.get_world_size(self.group)

    def exchange(self, mine: Any) -> list:
        """The values of all ranks, rank 0's first."""
        everyone: list = [None] * self.world_size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def fail(self, text: str, cause: Exception | None = None) -> NoReturn:
        raise CommunicatorError(
            f"Communicator: peer memory ({self.provider}) could not be created: {text}"
        ) from cause

    def together(self, step: str, call: Callable[[], Any]) -> Any:
        """What call() returns here, once it has returned on all ranks."""
        result, cause = None, None
        try:
            result = call()
        except Exception as error:
            cause = error
        problems = self.exchange("" if cause is None else f"{type(cause).__name__}: {cause}")
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        if failed:
            self.fail(f"{step}: " + "; ".join(failed), cause)
        return result


class _Place(NamedTuple):
    """Where a rank's buffer lies."""

    nbytes: int
    host: str
    index: int
    uuid: str  # of the GPU: an index means another one where CUDA_VISIBLE_DEVICES differs


def _place(device: torch.device | int | str, nbytes: int, ranks: _Ranks) -> _Place:
    """Checks this rank's arguments."""
    if not 1 <= ranks.world_size <= MAX_RANKS:
        raise ValueError(
            f"the group has {ranks.world_size} ranks; the CUDA kernels work on 1 to {MAX_RANKS}"
        )
    if not isinstance(nbytes, int) or nbytes <= 0:
        raise ValueError(f"nbytes is {nbytes!r}; it must be a positive integer")
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device is {device}; it must be a CUDA device")
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no CUDA device here")
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return _Place(nbytes, socket.gethostname(), index, uuid)


def _agree(ranks: _Ranks, place: _Place, told_by_index: bool = False) -> None:
    """Raises the same error on all ranks unless nbytes are equal and every rank has its own GPU.

    told_by_index: whether the provider tells the GPUs of a host apart by their index.
    """
    places: list[_Place] = ranks.exchange(place)
    sizes = [place.nbytes for place in places]
    if len(set(sizes)) > 1:
        ranks.fail(f"ranks disagree on nbytes: {sizes}")
    if shared := _shared([place.uuid for place in places]):
        ranks.fail(
            f"ranks {shared} share GPU {places[shared[0]].uuid}; each rank needs a GPU of its own. "
            "For several ranks on one GPU use coconet_ops.LocalCommunicator, in one process"
        )
    if told_by_index and (shared := _shared([(place.host, place.index) for place in places])):
        ranks.fail(
            f"ranks {shared} call different GPUs cuda:{places[shared[0]].index}; torch tells GPUs "
            "apart by their index: make all of them visible to every rank (CUDA_VISIBLE_DEVICES) "
            "and give each rank another one"
        )


def _shared(values: list) -> list[int]:
    """The ranks that have the same value, of the first value that several have."""
    for value in values:
        ranks = [rank for rank, other in enumerate(values) if other == value]
        if len(ranks) > 1:
            return ranks
    return []


def _symmetric_memory() -> Any:
    """torch's module, once it is known to have what is needed of it."""
    name = "torch.distributed._symmetric_memory"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise _missing(name) from error
    _require(module, name, "rendezvous")
    _require(module, name, "_SymmetricMemory")
    _require(module._SymmetricMemory, f"{name}._SymmetricMemory", "empty_strided_p2p")
    return module


def _pointers(handle: Any, tensor: torch.Tensor, ranks: _Ranks) -> list[int]:
    """Every rank's buffer, once the handle that rendezvous gave is as it is meant to be."""
    for name in ("rank", "world_size", "buffer_size", "buffer_ptrs", "barrier"):
        _require(handle, "the handle of rendezvous", name)
    if (handle.rank, handle.world_size) != (ranks.rank, ranks.world_size):
        raise RuntimeError(
            f"the handle is rank {handle.rank} of {handle.world_size}, but the group says rank "
            f"{ranks.rank} of {ranks.world_size}"
        )
    if handle.buffer_size < tensor.numel():
        raise RuntimeError(
            f"the handle's buffer has {handle.buffer_size} bytes of {tensor.numel()} asked for"
        )
    pointers = [int(pointer) for pointer in handle.buffer_ptrs]
    if len(pointers) != ranks.world_size:
        raise RuntimeError(f"the handle has {len(pointers)} buffers for {ranks.world_size} ranks")
    if pointers[ranks.rank] != tensor.data_ptr():
        raise RuntimeError(
            f"the handle's own buffer is at {pointers[ranks.rank]:#x}, but the tensor is at "
            f"{tensor.data_ptr():#x}"
        )
    unreachable = [rank for rank, pointer in enumerate(pointers) if pointer == 0]
    if unreachable:
        raise RuntimeError(f"the memory of ranks {unreachable} can't be reached by load and store")
    for rank, pointer in enumerate(pointers):
        if pointer % ALIGNMENT:
            raise RuntimeError(
                f"the buffer of rank {rank} is at {pointer:#x}, not a multiple of {ALIGNMENT}"
            )
    return pointers


def _require(owner: object, name: str, attribute: str) -> None:
    if not hasattr(owner, attribute):
        raise _missing(f"{name}.{attribute}")


def _missing(what: str) -> RuntimeError:
    return RuntimeError(
        f"torch {torch.__version__} has no {what}; versions known to have it: {KNOWN_TORCH}"
    )
