"""The communicator: the ranks of a group on one host, and their symmetric heap."""

from __future__ import annotations

import atexit
import functools
import math
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Union

import torch
import torch.distributed as dist

from . import _C, checks, cuda_peer
from .errors import CommunicatorError

Group = Union["Communicator", "dist.ProcessGroup", None]

_cache: dict[tuple[dist.ProcessGroup, str], Communicator] = {}  # by group and type of device
_cache_lock = threading.RLock()
_open: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


class Communicator:
    """The ranks of a process group, with every rank's heap mapped into every other.

    Collective: all ranks of the group construct it together.

    Args:
        group: a ``torch.distributed`` process group; None is the default group. Its ranks must
            share one host. The group serves only to meet; nothing is sent through it later.
        device: where the tensors are: ``"cpu"``, or this rank's CUDA device, which no other rank
            of the group has.
        heap_bytes: capacity of each rank's heap, equal on all ranks. On the CPU address space
            only: pages are taken as tensors are allocated; by default the machine's memory. Where
            the system's pool of 2 MiB pages (``vm.nr_hugepages``) has room for all of it, it lies
            there. On a CUDA device memory is taken at once; by default 1 GiB.
        timeout: how long any wait for a peer may last.
        peer_memory: what maps CUDA devices' memory into each other: ``"symmetric"``
            (``torch.distributed._symmetric_memory``) or ``"nccl"`` (NCCL's windows; in builds
            with NCCL).

    Attributes:
        rank, world_size: of this rank, in the group.
        backend: ``"shm"``, ``"cuda_peer"``, or ``"local"`` for a rank of a
            :class:`LocalCommunicator`.
        device: where the heap is, and all tensors that its calls take.

    Raises:
        CommunicatorError: ranks on several hosts (named), more than 64 ranks (16 on CUDA devices),
            ranks that disagree on heap_bytes or COCONET_CHECK, bad arguments on some rank, no
            shared memory to be had, or devices that can't reach each other; on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
        heap_bytes: int | None = None,
        timeout: timedelta = timedelta(seconds=60),
        peer_memory: str = "symmetric",
        _peers: dict[str, Any] | None = None,  # for tests: options of cuda_peer.connect
        _liveness: str = "auto",
        _first_epoch: int = 0,
    ) -> None:
        not_a_member = dist.GroupMember.NON_GROUP_MEMBER
        if group not in (None, not_a_member) and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"Communicator: group is a {type(group).__name__}; give a process group or None"
            )
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "Communicator: torch.distributed is not initialized; "
                "call torch.distributed.init_process_group first"
            )
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.timeout = timeout
        if self.rank < 0:
            raise ValueError("Communicator: this process is not a member of the group")
        self.device = torch.device(device)
        if self.device.type == "cuda" or _peers is not None:
            self._connect_devices(group, heap_bytes, peer_memory, **(_peers or {}))
            return
        if self.device.type != "cpu":
            raise ValueError(f"Communicator: device is {device}; it must be cpu or cuda")
        self.backend = "shm"
        rendezvous, host, problem = None, "", ""
        try:
            heap_bytes, seconds = check_limits(heap_bytes, timeout)
            host = _C.host_identity()
            rendezvous = _C.Rendezvous(heap_bytes)
        except (TypeError, ValueError) as error:
            problem = str(error)
        except (OSError, RuntimeError) as error:
            problem = f"no shared memory: {error}"
        mine = {
            "problem": problem,
            "on": "cpu",
            "host": (host, socket.gethostname()),
            "heap_bytes": heap_bytes,
            "address": rendezvous.address if rendezvous else "",
            "cpus": usable_cpus(),
            "check": calls_are_compared(),
            "pidfd": bool(rendezvous and rendezvous.has_pidfd and _liveness != "heartbeat"),
        }
        ranks: list[dict] = _exchange(mine, group, self.world_size)
        _agree(ranks)
        self._core = None
        try:
            self._core = rendezvous.connect(
                rank=self.rank,
                addresses=[r["address"] for r in ranks],
                use_pidfds=all(r["pidfd"] for r in ranks),
                heap_bytes=heap_bytes,
                timeout=seconds,
                check=mine["check"],
                first_epoch=_first_epoch,
                oversubscribed=oversubscribed([r["cpus"] for r in ranks]),
            )
        except (OSError, RuntimeError) as error:
            problem = str(error)
            rendezvous = None  # peers that still wait for this rank learn that it won't come
        # Vote: either all ranks have a communicator or none.
        votes: list[str] = _exchange(problem, group, self.world_size)
        failed = [f"rank {r}: {text}" for r, text in enumerate(votes) if text]
        if failed:
            self.close()
            raise CommunicatorError("Communicator: could not be created: " + "; ".join(failed))
        self._start(dist.group.WORLD if group is None else group)

    def _connect_devices(
        self,
        group: dist.ProcessGroup | None,
        heap_bytes: int | None,
        provider: str,
        **test_options: Any,
    ) -> None:
        self.backend = "cuda_peer"
        self._core = None
        problem, seconds = "", 0.0
        try:
            if heap_bytes is None:
                heap_bytes = cuda_peer.HEAP_BYTES
            heap_bytes, seconds = check_limits(heap_bytes, self.timeout)
            if self.device.type == "cuda" and self.device.index is None:
                if not torch.cuda.is_available():
                    raise ValueError(f"device is {self.device}, but torch finds no CUDA device")
                self.device = torch.device("cuda", torch.cuda.current_device())
        except (TypeError, ValueError) as error:
            problem = str(error)
        _agree_on_devices(_exchange({"problem": problem, "on": "cuda"}, group, self.world_size))
        self._core = cuda_peer.connect(
            group,
            self.device,
            heap_bytes=heap_bytes,
            seconds=seconds,
            check=calls_are_compared(),
            provider=provider,
            exchange=lambda mine: _exchange(mine, group, self.world_size),
            **test_options,
        )
        self._start(dist.group.WORLD if group is None else group)

    @classmethod
    def _of_core(
        cls,
        core: _C.Communicator,
        *,
        rank: int,
        world_size: int,
        backend: str,
        device: torch.device,
        timeout: timedelta,
    ) -> Communicator:
        """One that has no process group."""
        self = cls.__new__(cls)
        self.rank, self.world_size = rank, world_size
        self.backend, self.device, self.timeout = backend, device, timeout
        self._core = core
        self._start(None)
        return self

    def _start(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._id = self._core.register()
        _open[self._id] = self

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return (
            f"Communicator(rank={self.rank}, world_size={self.world_size}, "
            f"backend={self.backend!r}, {state})"
        )

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed, by :meth:`close` or by a failure."""
        return self._core is None or self._core.closed

    @property
    def heap_bytes(self) -> int:
        """Capacity of the heap in bytes."""
        return self._core.heap_bytes

    @property
    def heap_allocated(self) -> int:
        """Bytes of the heap in live blocks. Blocks that some rank still holds count."""
        return self._core.heap_allocated

    def empty(
        self,
        *size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """An uninitialized tensor in the symmetric heap, contiguous, with a storage of its own.

        Collective. Its memory is reused once all ranks have dropped theirs.

        Args:
            size: as in ``torch.empty``, the same number of bytes on all ranks.
            dtype: default: torch's default dtype.
            device: that of the communicator, or None.

        Raises:
            MemoryError: the heap or the system has no room; on every rank.
        """
        with checks.arguments(self, "empty"):
            if len(size) == 1 and isinstance(size[0], Sequence):  # torch.Size too
                size = tuple(size[0])
            # "cuda" means this communicator's.
            here = (self.device, torch.device(self.device.type))
            if device is not None and torch.device(device) not in here:
                raise ValueError(
                    f"empty: device is {device}; the {self.backend} backend has {self.device}"
                )
            if any(not isinstance(n, int) or n < 0 for n in size):
                raise ValueError(f"empty: size is {size}; sizes are integers >= 0")
            dtype = dtype or torch.get_default_dtype()
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"empty: dtype is {dtype!r}; it must be a torch.dtype")
            if max(math.prod(size) * dtype.itemsize, *size, 0) >= 2**63:
                raise ValueError(f"empty: size is {size}; these are more bytes than 2^63")
        return self._core.empty(list(size), dtype)

    @property
    def huge_pages(self) -> bool:
        """Whether this rank's heap lies in huge pages of the system's pool."""
        return self._core.huge_pages

    @property
    def tuning(self) -> dict[str, int]:
        """The sizes in bytes that decide how calls run here; see docs/tuning.md."""
        return self._core.tuning

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is in this rank's heap."""
        return tensor.device == self.device and self._core.owns(tensor)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._core.barrier()

    def close(self) -> None:
        """Drops the peers' memory, descriptors and threads. Not collective: peers that call on get
        :class:`PeerLostError`. Tensors in this rank's heap stay valid."""
        if self._core is not None:
            self._core.close()

    def _ping(self, rounds: int) -> float:
        """Nanoseconds per flag round trip between ranks 0 and 1. Collective."""
        return self._core.ping(rounds)

    def _inject_fault(self, phase: str, signal: int) -> None:
        """For tests: sends this process the signal when it is about to post the phase."""
        self._core.inject_fault(phase, signal)


def check_limits(heap_bytes: object, timeout: object) -> tuple[int, float]:
    """heap_bytes rounded up to huge pages, and the timeout in seconds."""
    if heap_bytes is None:
        heap_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not isinstance(heap_bytes, int):
        raise TypeError(f"heap_bytes is {heap_bytes!r}; it must be an integer")
    if heap_bytes <= 0:
        raise ValueError(f"heap_bytes is {heap_bytes}; it must be positive")
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is {timeout!r}; it must be a datetime.timedelta")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout is {timeout}; it must be positive")
    # A long timeout means never; in C++ it is a number of nanoseconds.
    return -(-heap_bytes // (2 << 20)) * (2 << 20), min(timeout.total_seconds(), 1e9)


def calls_are_compared() -> bool:
    return os.environ.get("COCONET_CHECK", "1") != "0"


def usable_cpus() -> tuple[set[int], float]:
    """The CPUs that this process may run on, and how many of them its control group may use."""
    quota = math.inf
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if limit != "max":
            quota = int(limit) / int(period)
    except (OSError, ValueError):  # no cgroup v2 here
        pass
    return os.sched_getaffinity(0), quota


def oversubscribed(ranks: list[tuple[set[int], float]]) -> bool:
    """Whether some ranks, with these usable CPUs, must share a core: then a waiting rank lets the
    others run early."""
    cpus = set().union(*(usable for usable, _ in ranks))
    return len(ranks) > min(len(cpus), *(quota for _, quota in ranks))


def _exchange(mine: object, group: dist.ProcessGroup | None, world_size: int) -> list:
    everyone: list = [None] * world_size
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _agree_on_devices(ranks: list[dict]) -> None:
    """Raises the same error on every rank if one has a problem or only some are on the CPU."""
    failed = [f"rank {r}: {info['problem']}" for r, info in enumerate(ranks) if info["problem"]]
    if failed:
        raise CommunicatorError("Communicator: could not be created: " + "; ".join(failed))
    types = [info["on"] for info in ranks]
    if len(set(types)) > 1:
        raise CommunicatorError(f"Communicator: ranks disagree on device: {types}")


def _agree(ranks: list[dict]) -> None:
    """Raises the same error on every rank unless all of them can share memory."""
    _agree_on_devices(ranks)
    if len(ranks) > _C.max_ranks:
        raise CommunicatorError(
            f"Communicator: the group has {len(ranks)} ranks; at most {_C.max_ranks} are supported"
        )
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank, info in enumerate(ranks):
        hosts.setdefault(info["host"], []).append(rank)
    if len(hosts) > 1:
        where = "; ".join(
            f"{name} ({identity}): ranks {members}" for (identity, name), members in hosts.items()
        )
        raise CommunicatorError(
            "Communicator: the ranks are not on one host (same boot and network namespace), so "
            f"they can't share memory: {where}"
        )
    sizes = [info["heap_bytes"] for info in ranks]
    if len(set(sizes)) > 1:
        raise CommunicatorError(f"Communicator: ranks disagree on heap_bytes (rounded): {sizes}")
    # Where only some ranks compare, a disagreement would be an error on those alone.
    checking = [rank for rank, info in enumerate(ranks) if info["check"]]
    if 0 < len(checking) < len(ranks):
        others = [rank for rank in range(len(ranks)) if rank not in checking]
        raise CommunicatorError(
            f"Communicator: ranks disagree on COCONET_CHECK: on for ranks {checking}, 0 for ranks "
            f"{others}; set it to one value everywhere"
        )


def communicator(group: Group = None, device: str = "cpu") -> Communicator:
    """The communicator of a group, created on first use (then collective) and cached.

    Args:
        group: a process group, None for the default group, or a communicator, which is returned.
        device: type of the device where the tensors are: ``"cpu"`` or ``"cuda"``, which is this
            rank's current device. Each has a communicator of its own.
    """
    if group is None:
        group = dist.group.WORLD
    elif isinstance(group, Communicator):
        return group
    # Without the lock: every call of an op comes here.
    return _cache.get((group, device)) or _create(group, device)


def communicator_for(x: object, group: Group) -> Communicator:
    """The communicator of a group for a tensor x; checks say what is wrong with another x."""
    if type(group) is Communicator:
        return group
    return communicator(group, "cuda" if isinstance(x, torch.Tensor) and x.is_cuda else "cpu")


def _create(group: dist.ProcessGroup | None, device: str) -> Communicator:
    if group is None:
        raise RuntimeError(
            "coconet_ops: torch.distributed is not initialized; "
            "call torch.distributed.init_process_group first"
        )
    with _cache_lock:
        comm = _cache.get((group, device))
        if comm is None:
            comm = _cache[group, device] = Communicator(group, device=device)
        return comm


@torch.compiler.assume_constant_result
def number(group: Group, device: str) -> int:
    """What torch ops call the communicator of a group; a constant of compiled code."""
    return communicator(group, device)._id


@torch.compiler.assume_constant_result
def world_size(group: Group, device: str) -> int:
    """The world size of a group; a constant of compiled code."""
    return communicator(group, device).world_size


def by_number(number: int) -> Communicator:
    """The communicator that torch ops call by this number."""
    comm = _open.get(number)
    if comm is not None:
        return comm
    raise CommunicatorError(
        "coconet_ops: the communicator of this call doesn't exist any more; "
        "code that was compiled for it needs torch.compiler.reset()"
    )


def _all_open() -> list[Communicator]:
    # A copy of the references at once: other threads may add some meanwhile.
    return [comm for ref in _open.valuerefs() if (comm := ref()) is not None]


def _registered(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed still knows the group."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return False
    return True


_destroy_process_group = dist.destroy_process_group


@functools.wraps(_destroy_process_group)
def _destroy_group_and_communicators(group: dist.ProcessGroup | None = None) -> None:
    _destroy_process_group(group)
    for comm in _all_open():
        if comm._group is not None and not _registered(comm._group):
            comm.close()
            _cache.pop((comm._group, comm.device.type), None)


# torch has no hook for it, and a group object may outlive its destruction: torch modules that are
# imported late keep the default group in their functions' default arguments.
dist.destroy_process_group = _destroy_group_and_communicators


@atexit.register
def _close_all() -> None:
    for comm in _all_open():
        comm.close()
