"""Ranks that are threads of one process."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from . import _C
from .communicator import (
    Communicator,
    calls_are_compared,
    check_limits,
    oversubscribed,
    usable_cpus,
)
from .errors import CommunicatorError, MismatchError, PeerLostError

_NAME = "LocalCommunicator"


class LocalCommunicator:
    """``world_size`` virtual ranks in this process, on one device: to test, debug and measure code
    for several ranks without starting them.

    Each rank has a :class:`Communicator`, which the ops take as ``group``, and calls them from a
    thread of its own. Calls wait for each other, so two ranks that share a thread never meet; on
    the CPU the first call then ends in :class:`CommunicatorTimeout`.

    :meth:`run` starts the threads::

        def step(comm):
            return co.all_reduce(torch.full((3,), float(comm.rank)), group=comm)

        with co.LocalCommunicator(4) as local:
            results = local.run(step)  # by rank

    The ranks are threads of one Python: tensors, models and optimizers belong to one rank each,
    whereas torch's default random generator is shared by all (give each rank a
    ``torch.Generator``). Process groups play no part.

    Args:
        world_size: number of ranks: 1 to 64 on the CPU, 1 to 16 on a CUDA device.
        device: ``"cpu"`` or a CUDA device, whose memory and multiprocessors the ranks share. There
            the threads of a call meet on the host, and one kernel is launched for all; all ranks
            call on the same stream.
        heap_bytes: as in :class:`Communicator`; on a CUDA device memory is taken at once, by
            default 1 GiB per rank.
        timeout: as in :class:`Communicator`.

    Attributes:
        ranks: the communicators, by rank; their backend is ``"local"``.
        world_size: number of ranks.
        device: where their heaps are, and all tensors that calls take.

    Raises:
        TypeError, ValueError: bad arguments.
        CommunicatorError: no shared memory to be had, no CUDA device, or a build without CUDA.
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: torch.device | str = "cpu",
        heap_bytes: int | None = None,
        timeout: timedelta = timedelta(seconds=60),
        _first_epoch: int = 0,
        _backend: _C.Backend | None = None,
        _launch: dict[str, int] | None = None,
    ) -> None:
        if not isinstance(world_size, int):
            raise TypeError(f"{_NAME}: world_size is {world_size!r}; it must be an integer")
        self.device = _full_device(device)
        on_cpu = self.device.type == "cpu" and _backend is None
        most = _C.max_ranks if on_cpu else _C.max_device_ranks
        if not 1 <= world_size <= most:
            raise ValueError(
                f"{_NAME}: world_size is {world_size}; it must be between 1 and {most}"
            )
        if heap_bytes is None and not on_cpu:
            heap_bytes = 1 << 30
        try:
            heap_bytes, seconds = check_limits(heap_bytes, timeout)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{_NAME}: {error}") from None
        self.world_size = world_size
        options = {
            "world": world_size,
            "heap_bytes": heap_bytes,
            "timeout": seconds,
            "check": calls_are_compared(),
            "first_epoch": _first_epoch,
        }
        try:
            if on_cpu:
                shared = oversubscribed([usable_cpus()] * world_size)
                cores = _C.local_communicators(**options, oversubscribed=shared)
            else:
                backend = _backend or _C.cuda_backend()
                cores = backend.local_communicators(
                    **options, device=self.device, **(_launch or {})
                )
        except CommunicatorError:
            raise
        except (OSError, RuntimeError) as error:
            raise CommunicatorError(f"{_NAME}: no shared memory: {error}") from error
        self.ranks = [
            Communicator._of_core(
                core,
                rank=rank,
                world_size=world_size,
                backend="local",
                device=self.device,
                timeout=timeout,
            )
            for rank, core in enumerate(cores)
        ]
        self._running = threading.Lock()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"{_NAME}(world_size={self.world_size}, device={str(self.device)!r}, {state})"

    def __enter__(self) -> LocalCommunicator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether some rank was closed, by :meth:`close` or by a failure."""
        return any(comm.closed for comm in self.ranks)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``fn(comm, *args)`` in a thread per rank, where ``comm`` is that rank's
        communicator, and waits for all of them. The results, by rank.

        The threads have the caller's grad mode and inference mode, and on a CUDA device its current
        stream, so that it may capture them in a graph. Their backward passes stay in them.

        Raises:
            whatever a rank raised: it is then closed, so that its peers end with
                :class:`PeerLostError`, and what came first is raised once all have ended. Ctrl-C
                too closes the ranks and waits for the threads, which end at their next call.
            CommunicatorError: it is closed.
            RuntimeError: it is running already.
        """
        if self.closed:
            raise CommunicatorError(f"{_NAME}.run: the communicator is closed")
        if not self._running.acquire(blocking=False):
            raise RuntimeError(f"{_NAME}.run: it is running already; each rank has one thread")
        try:
            return self._run(fn, args)
        finally:
            self._running.release()

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        results: list[Any] = [None] * self.world_size
        failures: list[BaseException] = []  # in order of time
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def work(comm: Communicator) -> None:
            try:
                with (
                    torch.inference_mode(inference),
                    torch.set_grad_enabled(grad),
                    torch.autograd.set_multithreading_enabled(False),
                    _current(stream),
                ):
                    results[comm.rank] = fn(comm, *args)
            except BaseException as error:
                if sys.version_info >= (3, 11):
                    error.add_note(f"raised by rank {comm.rank} of a {_NAME}")
                failures.append(error)
                comm.close()

        threads = [
            threading.Thread(target=work, args=(comm,), name=f"rank {comm.rank}", daemon=True)
            for comm in self.ranks
        ]
        _start_and_join(threads, otherwise=self.close)
        if failures:
            self.close()
            try:
                raise min(failures, key=_distance_from_the_cause)
            finally:
                failures.clear()  # a traceback holds this frame
        return results

    def close(self) -> None:
        """Closes every rank. Calls that are waiting end with :class:`PeerLostError`; tensors in
        the heaps stay valid."""
        # A rank closes once its call has ended, which may need another rank to close.
        _start_and_join([threading.Thread(target=comm.close) for comm in self.ranks])


@contextlib.contextmanager
def _current(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Makes a stream and its device this thread's; a new thread has the default stream of device
    0."""
    if stream is None:
        yield
    else:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield


def _full_device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"{_NAME}: device is {device}; it must be cpu or cuda")
    if not torch.cuda.is_available():
        raise CommunicatorError(f"{_NAME}: device is {device}, but torch finds no CUDA device")
    return torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )


def _start_and_join(
    threads: list[threading.Thread], otherwise: Callable[[], None] = lambda: None
) -> None:
    """Starts the threads and waits for their ends. An exception meanwhile (Ctrl-C, or no more
    threads to be had) first calls otherwise."""
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        otherwise()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise


def _distance_from_the_cause(error: BaseException) -> int:
    """A rank that fails makes its peers fail: bad arguments are a mismatch for them, and a closed
    communicator a lost peer."""
    if isinstance(error, PeerLostError):
        return 2
    return 1 if isinstance(error, MismatchError) else 0
