"""Processes beside the ranks, for libraries of which a process can load only one: MPI.

Each rank has one such process for each of these peers. It runs on the rank's core, builds the
peer's candidates from memory of its own, and loads, runs and times them when its rank says so;
while others are measured it sleeps in a read.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

import coconet_ops as co

from . import peers
from .limits import Cores, pin_threads
from .model import BenchError, Buffers, Candidate, Problem
from .peers import Peer

START_SECONDS = 60.0
REPLY_SECONDS = 120.0
GRACE_SECONDS = 1.0
LOG_BYTES = 2000  # of its output that an error shows

# --- in the rank ---------------------------------------------------------------------------------


class Sidecar:
    """A peer's process beside this rank; made, connected and closed by all ranks together."""

    def __init__(self, peer: Peer, comm: co.Communicator, cores: Cores) -> None:
        """Start it, but don't wait until it has started."""
        self._peer = peer
        self._cores = cores
        self._folder = tempfile.TemporaryDirectory(prefix="coconet-bench-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder.name}/rank")
        self._listener.listen()
        self._connection: Connection | None = None
        addresses = [""] * comm.world_size
        dist.all_gather_object(addresses, self._listener.getsockname())
        self._log = tempfile.TemporaryFile()
        self._launcher = None
        if comm.rank == 0:
            launch, environment = peer.library.launcher(comm.world_size, cores.oversubscribed)
            self._launcher = subprocess.Popen(
                [*launch, sys.executable, "-m", __name__, peer.name, *addresses],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the ranks; it dies with them
            )

    def connect(self) -> None:
        """Wait until it has started."""
        end = time.monotonic() + START_SECONDS
        self._listener.settimeout(0.2)
        while self._connection is None:
            try:
                accepted, _ = self._listener.accept()
                accepted.setblocking(True)
                self._connection = Connection(accepted.detach())
            except TimeoutError:
                ended = self._launcher is not None and self._launcher.poll() is not None
                if ended or time.monotonic() > end:
                    raise self._error("did not start") from None
        self._listener.close()
        self._folder.cleanup()
        self.call("pin", self._cores.own)

    def candidates(self, problem: Problem, buffers: Buffers) -> list[Candidate]:
        """As of a peer that runs in the rank itself."""
        found = self.call("open", problem.op, problem.dtype, problem.layout, problem.count)
        return [_Remote(self, index, *facts) for index, facts in enumerate(found)]

    def call(self, method: str, *arguments: object) -> object:
        """Have its `_Server` do something and wait for the result."""
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(REPLY_SECONDS):
                raise self._error("hangs")
            value, error = self._connection.recv()
        except (EOFError, OSError):
            time.sleep(GRACE_SECONDS)  # where another rank's failure ended it, that rank tells
            raise self._error("died") from None
        if error:
            raise self._error(f"failed: {error}")
        return value

    def result(self, index: int) -> list[Tensor]:
        """What a candidate's last call has given."""
        dtypes = self.call("result", index)
        pieces = [self._connection.recv_bytes() for _ in dtypes]
        return [
            torch.frombuffer(bytearray(piece), dtype=dtype)
            for piece, dtype in zip(pieces, dtypes, strict=True)
        ]

    @property
    def name(self) -> str:
        return self._peer.name

    @property
    def ops(self) -> set[str]:
        return self._peer.ops

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.call("finish")
            if self._launcher:
                self._launcher.wait()
        if self._connection:
            self._connection.close()  # which ends it, whatever it is doing
        self._listener.close()
        self._folder.cleanup()

    def _error(self, what: str) -> BenchError:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_BYTES))
        log = self._log.read().decode(errors="replace").strip()
        return BenchError(f"{self.name}: its process {what}" + (f"\n{log}" if log else ""))


class _Remote(Candidate):
    """A candidate that lives in the sidecar and is timed there."""

    def __init__(self, sidecar: Sidecar, index: int, name: str, leeway: float) -> None:
        super().__init__(
            name,
            load=lambda: sidecar.call("load", index),
            run=lambda: sidecar.call("run", index),
            result=lambda: sidecar.result(index),
            reset=lambda: sidecar.call("reset", index),
            peer=sidecar.name,
            leeway=leeway,
        )
        self._sample = lambda calls: sidecar.call("sample", index, calls)

    def sample(self, barrier: Callable[[], None], calls: int) -> tuple[float, float]:
        return self._sample(calls)


# --- in the process beside it --------------------------------------------------------------------


class _Server:
    """Does what `Sidecar.call` asks for."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._library = peer.library
        self._buffers = Buffers(peer.library)
        self._candidates: list[Candidate] = []

    def pin(self, cores: set[int]) -> None:
        pin_threads(cores)

    def open(self, op: str, dtype: torch.dtype, layout: str, count: int) -> list[tuple[str, float]]:
        self._candidates.clear()
        gc.collect()  # their memory is for the next ones
        problem = Problem(op, dtype, layout, count, self._library)
        self._candidates = self._peer.candidates(problem, self._buffers)
        return [(candidate.name, candidate.leeway) for candidate in self._candidates]

    def load(self, index: int) -> None:
        self._candidates[index].load()

    def run(self, index: int) -> None:
        self._candidates[index].run()

    def reset(self, index: int) -> None:
        self._candidates[index].reset()

    def result(self, index: int) -> list[Tensor]:
        return list(self._candidates[index].result())

    def sample(self, index: int, calls: int) -> tuple[float, float]:
        seconds = self._candidates[index].sample(self._library.barrier, calls)
        self._library.barrier()  # before a rank goes on and takes a core that they share
        return seconds

    def finish(self) -> None:
        self._library.finish()


def main(name: str, *addresses: str) -> None:
    """Serve one rank until it says `finish` or dies."""
    faulthandler.enable()
    torch.set_num_threads(1)
    peer = peers.find()[name]
    peer.library.start()
    finished = threading.Event()
    with Client(addresses[peer.library.rank], "AF_UNIX") as connection:
        threading.Thread(target=_die_with_rank, args=(connection, finished), daemon=True).start()
        server = _Server(peer)
        while not finished.is_set():
            method, arguments = connection.recv()
            try:
                value, error = getattr(server, method)(*arguments), ""
            except Exception:
                value, error = None, traceback.format_exc()
            if method == "finish":
                finished.set()  # first, since the rank goes on at the reply
            if method == "result" and not error:
                connection.send(([piece.dtype for piece in value], ""))
                for piece in value:
                    connection.send_bytes(piece.detach().view(torch.uint8).numpy())
            else:
                connection.send((value, error))


def _die_with_rank(connection: Connection, finished: threading.Event) -> None:
    """The main thread may be deep in a wait for a process whose rank is dead too."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    if finished.is_set():
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/dev/shm/"):  # the library would have removed it at its end
            Path(path).unlink(missing_ok=True)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
