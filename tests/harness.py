"""Ranks for the tests: processes that hold one gloo group (the backend "shm"), or threads of one
process that hold a `LocalCommunicator` (all other backends).

`RankPool` reuses its processes from case to case; `run_fresh` starts new ones for cases that kill,
stop or exit. Both fork from a server that has torch loaded, so that a rank starts in milliseconds;
but CUDA doesn't survive a fork, so its processes start from nothing.
A rank that doesn't answer becomes a failure that shows every rank's stack.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WATCHDOG = 120.0  # seconds: a hang detector, not a speed limit
GRACE = 8.0  # seconds for the other ranks once one has failed
HEAP_BYTES = 96 << 20
EMULATED_HEAP_BYTES = 24 << 20
TIMEOUT = timedelta(seconds=40)

# The first optimizer imports torch._dynamo, which takes seconds.
_PRELOAD = ["torch", "torch._dynamo", "torch.nn.parallel", "torch.distributed", "numpy", "pytest"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)
_unforked = multiprocessing.get_context("spawn")


# --- backends ------------------------------------------------------------------------------------

BACKENDS = ("shm", "local", "emulated", "cuda")


def missing_backends() -> dict[str, str]:
    """The backends that don't work here, and why."""
    missing = {}
    if not torch.cuda.is_available():
        missing["cuda"] = "torch finds no CUDA device"
    return missing


def _make_local(backend: str, world_size: int, heap_bytes: int, timeout: timedelta):
    import coconet_ops as co

    options = {}
    if backend == "cuda":
        options = {"device": "cuda"}
    elif backend == "emulated":
        heap_bytes = min(heap_bytes, EMULATED_HEAP_BYTES)  # its memory is taken at once
        options = {"_backend": emulated_backend(), "_launch": {"blocks": 2, "threads": 64}}
    return co.LocalCommunicator(world_size, heap_bytes=heap_bytes, timeout=timeout, **options)


@functools.cache
def emulated_backend():
    """The CUDA backend over the emulator; builds what has changed of it."""
    from coconet_ops import _C

    # Not the job server of the `make test` that may have started this.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    root = Path(__file__).parents[1]
    subprocess.run(
        ["make", "-s", "-C", root / "csrc/emulator"], env=environment, check=True, stdout=sys.stderr
    )
    return _C.load_backend(str(root / "build/emulated/libcoconet_emulated.so"))


# --- inside a rank -------------------------------------------------------------------------------

_communicator = None  # of a rank that is a process


class _Thread(threading.local):
    """What a rank that is a thread knows."""

    comm = None
    shared: _Shared | None = None
    others: list = []  # communicators of the running case


_thread = _Thread()
_seeding = threading.RLock()


class _Shared:
    """What ranks that are threads share: a place to exchange objects."""

    def __init__(self, backend: str, world_size: int) -> None:
        self.backend = backend
        self.values: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size)

    def gather(self, rank: int, value: Any) -> list[Any]:
        import coconet_ops as co

        try:
            self.barrier.wait()
            self.values[rank] = value
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise co.PeerLostError("another rank of this case has failed") from None
        return list(self.values)


def communicator():
    """This rank's communicator over all ranks, shared by the cases of a pool."""
    global _communicator
    import coconet_ops as co

    if _thread.comm is not None:
        return _thread.comm
    if _communicator is None or _communicator.closed:
        _communicator = co.Communicator(heap_bytes=HEAP_BYTES, timeout=TIMEOUT)
    return _communicator


def new_communicator(heap_bytes: int, timeout: timedelta = TIMEOUT):
    """Another communicator over the same ranks, for this case alone. Collective."""
    import coconet_ops as co

    if _thread.comm is None:
        return co.Communicator(heap_bytes=heap_bytes, timeout=timeout)
    rank, world_size = _thread.comm.rank, _thread.comm.world_size
    made = None
    if rank == 0:
        made = _make_local(_thread.shared.backend, world_size, heap_bytes, timeout)
    comm = gather_objects(made)[0].ranks[rank]
    _thread.others.append(comm)
    return comm


def fused_adam(params, **options):
    """The optimizer over this rank's communicator."""
    import coconet_ops as co

    return co.optim.DistributedFusedAdam(params, process_group=communicator(), **options)


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, over gloo; of threads the objects themselves."""
    if _thread.comm is not None:
        return _thread.shared.gather(_thread.comm.rank, value)
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def seeded(seed: int):
    """torch's default generator starts from the seed. Ranks that are threads share it, so they
    take turns: no collective call in here."""
    with _seeding:
        torch.manual_seed(seed)
        yield


def raised(call: Callable[[], Any]) -> tuple[str, str, list[str]]:
    """Calls and returns the exception's class name, message and the names of its base classes."""
    try:
        call()
    except BaseException as error:
        bases = [base.__name__ for base in type(error).__mro__]
        return type(error).__name__, str(error), bases
    return "nothing", "", []


def _call(message: bytes) -> Any:
    function, arguments = pickle.loads(message)
    return function(*arguments)


@contextlib.contextmanager
def _prepared(stacks: str, environment: dict[str, str]):
    """A process of ranks: shows its stacks when asked, ignores Ctrl-C."""
    with open(stacks, "w") as report:
        faulthandler.register(signal.SIGUSR1, file=report, all_threads=True)
        faulthandler.enable(file=report)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on the test run is the parent's
        os.environ.update(environment)
        torch.set_num_threads(1)
        yield


def _answer(channel, call: Callable[[bytes], Any]) -> None:
    """Answers each message with what the call returns or raises, until the parent hangs up."""
    while True:
        try:
            message = channel.recv_bytes()
        except EOFError:
            return
        try:
            reply = ("value", call(message))
        except BaseException as error:
            reply = ("error", type(error).__name__, traceback.format_exc())
        channel.send_bytes(pickle.dumps(reply))


def _serve(rank, world_size, rendezvous, channel, stacks, environment) -> None:
    """A rank that is a process."""
    with _prepared(stacks, environment):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        _answer(channel, _call)
        if _communicator is not None:
            _communicator.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _serve_threads(backend, world_size, channel, stacks, environment) -> None:
    """Ranks that are the threads of a process."""
    local = None

    def call(message: bytes) -> list[Any]:
        nonlocal local
        if local is None or local.closed:
            local = _make_local(backend, world_size, HEAP_BYTES, TIMEOUT)
        return local.run(_call_in_thread, _Shared(backend, world_size), message)

    with _prepared(stacks, environment):
        _answer(channel, call)


def _call_in_thread(comm, shared: _Shared, message: bytes) -> Any:
    _thread.comm, _thread.shared, _thread.others = comm, shared, []
    try:
        # So that the cases make their tensors where the communicator is.
        with contextlib.nullcontext() if comm.device.type == "cpu" else comm.device:
            return _call(message)
    except BaseException:
        shared.barrier.abort()
        for other in _thread.others:
            other.close()
        raise


# --- in the parent -------------------------------------------------------------------------------


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


class RankHang(AssertionError):
    """A rank didn't answer; the message shows the stacks of all ranks."""


@dataclass
class Outcome:
    """What one rank did: returned `value`, raised `error`, or ended with `exitcode`."""

    rank: int
    value: Any = None
    error_type: str | None = None
    error: str | None = None
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode is None

    def describe(self) -> str:
        if self.exitcode is not None:
            return f"ended with exit code {self.exitcode}"
        return "returned" if self.error is None else f"raised:\n{self.error}"


class Ranks:
    """`world_size` processes with one gloo group; the i-th has rank i."""

    def __init__(self, world_size: int, environment: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="coconet-ranks-")
        rendezvous = f"{self._folder.name}/rendezvous"
        self._begin(
            [(_serve, rank, world_size, rendezvous) for rank in range(world_size)],
            environment or {},
        )

    def _begin(self, processes: list[tuple], environment: dict[str, str], context=_context) -> None:
        self.world_size = len(processes)
        self._channels = []
        self._processes = []
        for rank, (serve, *arguments) in enumerate(processes):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(*arguments, theirs, self._stack_file(rank), environment),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._channels.append(ours)
            self._processes.append(process)

    def _stack_file(self, rank: int) -> str:
        return f"{self._folder.name}/stacks-{rank}"

    def start(self, function: Callable, *arguments: Any) -> None:
        """Begins function(*arguments) on every rank."""
        message = pickle.dumps((function, arguments))
        for channel in self._channels:
            with contextlib.suppress(BrokenPipeError):
                channel.send_bytes(message)

    def finish(self, without: Iterable[int] = (), patient: bool = True) -> list[Outcome]:
        """Outcomes by rank, except of ranks in `without`. Unless patient, ranks that wait in vain
        for one that has failed are given up soon."""
        outcomes = {}
        pending = set(range(self.world_size)) - set(without)
        deadline = time.monotonic() + WATCHDOG
        while pending:
            handles = {self._channels[rank]: rank for rank in pending}
            ready = connection.wait(list(handles), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankHang(self._hang_report(outcomes, pending))
            for handle in ready:
                rank = handles[handle]
                outcomes[rank] = self._receive(rank)
                pending.discard(rank)
                if not outcomes[rank].ok and not patient:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return [outcomes[rank] for rank in sorted(outcomes)]

    def _receive(self, rank: int) -> Outcome:
        try:
            reply = pickle.loads(self._channels[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(GRACE)
            return Outcome(rank, exitcode=self._processes[rank].exitcode)
        if reply[0] == "value":
            return Outcome(rank, value=reply[1])
        return Outcome(rank, error_type=reply[1], error=reply[2])

    def _hang_report(self, outcomes: dict[int, Outcome], pending: set[int]) -> str:
        for rank in pending:
            self.signal(rank, signal.SIGUSR1)
        time.sleep(1.0)
        lines = [f"ranks {sorted(pending)} of {self.world_size} don't answer"]
        lines += [f"rank {rank} {outcomes[rank].describe()}" for rank in sorted(outcomes)]
        for rank in sorted(pending):
            lines += [f"rank {rank} stands at:", Path(self._stack_file(rank)).read_text()]
        self.kill()
        return "\n".join(lines)

    def run(self, function: Callable, *arguments: Any) -> list[Any]:
        """function(*arguments) on every rank; the values by rank. Raises the first failure."""
        __tracebackhide__ = True
        self.start(function, *arguments)
        return values(self.finish(patient=False))

    def signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, number)

    def kill(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.is_alive():
                self.signal(rank, signal.SIGKILL)
        self._close()

    def close(self) -> list[int]:
        """Lets the ranks end; returns their exit codes. A rank that stays becomes a failure."""
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + WATCHDOG
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        if None in codes:
            stuck = {rank for rank, code in enumerate(codes) if code is None}
            raise RankHang(self._hang_report({}, stuck))
        self._close()
        return codes

    def _close(self) -> None:
        for process in self._processes:
            process.join(GRACE)
            process.close()
        for channel in self._channels:
            channel.close()
        self._processes = []
        self._folder.cleanup()


class ThreadRanks(Ranks):
    """`world_size` threads of one process, which counts as a single rank here."""

    def __init__(self, backend: str, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="coconet-ranks-")
        context = _unforked if backend == "cuda" else _context
        self._begin([(_serve_threads, backend, world_size)], {}, context)

    def run(self, function: Callable, *arguments: Any) -> list[Any]:
        __tracebackhide__ = True
        return super().run(function, *arguments)[0]


class RankPool:
    """One set of ranks per world size, rebuilt after a failure."""

    def __init__(self, backend: str = "shm") -> None:
        self.backend = backend
        self._ranks: dict[int, Ranks] = {}

    def run(self, world_size: int, function: Callable, *arguments: Any) -> list[Any]:
        __tracebackhide__ = True
        if world_size not in self._ranks:
            self._ranks[world_size] = self._start(world_size)
        try:
            return self._ranks[world_size].run(function, *arguments)
        except BaseException:
            self._ranks.pop(world_size).kill()
            raise

    def _start(self, world_size: int) -> Ranks:
        if self.backend == "shm":
            return Ranks(world_size)
        return ThreadRanks(self.backend, world_size)

    def close(self) -> None:
        while self._ranks:
            self._ranks.popitem()[1].close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WATCHDOG
    while not condition():
        assert time.monotonic() < deadline, "it doesn't happen"
        time.sleep(0.005)


def _shared_files() -> set[str]:
    """Names in /dev/shm, but for the locks of other programs that use multiprocessing."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def _in_use(file: str) -> bool:
    """Whether a process has mapped it: another program's, since the ranks have ended."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if file in maps.read_text():
                return True
    return False


def run_fresh(
    world_size: int,
    function: Callable,
    *arguments: Any,
    victims: Iterable[int] = (),
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """function(*arguments) on new ranks; the outcomes of all but the victims, which are killed at
    the end. The other ranks must then leave by themselves, and nothing may stay in /dev/shm."""
    victims = set(victims)
    shared = _shared_files()
    ranks = Ranks(world_size, environment)
    try:
        ranks.start(function, *arguments)
        outcomes = ranks.finish(without=victims)
        gone = victims | {outcome.rank for outcome in outcomes if outcome.exitcode is not None}
        for rank in victims:
            ranks.signal(rank, signal.SIGKILL)
        codes = ranks.close()
    except BaseException:
        ranks.kill()
        raise
    left = {rank: code for rank, code in enumerate(codes) if rank not in gone and code != 0}
    assert not left, f"exit codes of surviving ranks: {left}"
    files = _shared_files() - shared
    files = {name for name in files if not _in_use(f"/dev/shm/{name}")}
    assert not files, f"left in /dev/shm: {files}"
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """The values by rank; raises if a rank didn't return one."""
    __tracebackhide__ = True
    failed: dict[str, list[int]] = {}
    for outcome in outcomes:
        if not outcome.ok:
            failed.setdefault(outcome.describe(), []).append(outcome.rank)
    if failed:
        raise RankError("\n".join(f"ranks {ranks} {text}" for text, ranks in failed.items()))
    return [outcome.value for outcome in outcomes]


def assert_same_on_all_ranks(results: list[Any]) -> None:
    """Every rank returned the same (results are digests by case, or plain values)."""
    for rank, result in enumerate(results):
        if result == results[0]:
            continue
        if isinstance(result, dict):
            differ = [key for key in results[0] if result.get(key) != results[0][key]]
            raise AssertionError(f"rank {rank} differs from rank 0 in {differ}")
        raise AssertionError(f"rank {rank} has {result}, rank 0 {results[0]}")


def start_program(arguments: Iterable[str], folder: Path) -> subprocess.Popen:
    """Python with these arguments, in its own process group as a terminal would start it."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run in the background would hand on that it ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run_script(
    world_size: int,
    source: str,
    environment: dict[str, str] | None = None,
    launcher: Iterable[str] = (),
):
    """Runs Python source as `world_size` programs (argv: rank, world size, rendezvous file);
    returns (exit code, stderr) by rank. Unlike a pool's ranks they end as a user's program ends.
    launcher: a command in front of Python's."""
    with tempfile.TemporaryDirectory(prefix="coconet-script-") as folder:
        programs = [
            subprocess.Popen(
                [
                    *launcher,
                    sys.executable,
                    "-c",
                    source,
                    str(rank),
                    str(world_size),
                    f"{folder}/rendezvous",
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )
            for rank in range(world_size)
        ]
        try:
            return [
                (program.returncode, stderr)
                for program in programs
                for _, stderr in [program.communicate(timeout=WATCHDOG)]
            ]
        finally:
            for program in programs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)  # its children too
                program.wait()
