"""The parent's view of the ranks: starting, signalling, listening, and reporting when they hang."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from .plan import Fault
from .rank import serve

WATCHDOG = 120.0  # seconds without a word from a rank that should speak
GRACE = 10.0  # seconds for the others' own reports once one is broken
LOG_LINES = 30

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "coconet_ops.testing.rank"])


class Failed(Exception):
    """A rank saw what it shouldn't have, died, or hangs; the message shows all ranks."""


class Ranks:
    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="coconet-stress-")
        self._processes: list[Any] = [None] * world
        self._channels: list[Any] = [None] * world
        for rank in range(world):
            self.start(rank)

    def start(self, rank: int) -> None:
        ours, theirs = _context.Pipe()
        files = self._file("stacks", rank), self._file("log", rank)
        self._processes[rank] = _context.Process(
            target=serve, args=(rank, self._folder.name, theirs, *map(str, files)), daemon=True
        )
        self._processes[rank].start()
        theirs.close()
        self._channels[rank] = ours

    def _file(self, kind: str, rank: int) -> Path:
        return Path(self._folder.name) / f"{kind}-{rank}"

    def tell(self, rank: int, message: Any = None) -> None:
        try:
            self._channels[rank].send(message)
        except BrokenPipeError:
            raise Failed(self.report(f"rank {rank} has died")) from None

    def signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, number)

    def expect(self, ranks: Iterable[int], word: str) -> dict[int, Any]:
        """Waits until each of the ranks has said the word; what came with it."""
        values: dict[int, Any] = {}
        pending = set(ranks)
        deadline = time.monotonic() + WATCHDOG
        while pending:
            waiting = {self._channels[rank]: rank for rank in pending}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Failed(self.report(f"ranks {sorted(pending)} don't say {word!r}"))
            for channel in ready:
                rank = waiting[channel]
                try:
                    said, value = channel.recv()
                except (EOFError, ConnectionResetError):
                    raise Failed(self.report(f"rank {rank} has died")) from None
                if said != word:
                    raise Failed(self.report(f"rank {rank} says {said}, not {word}: {value}"))
                values[rank] = value
                pending.discard(rank)
        return values

    def insist(self, rank: int, number: int, word: str) -> None:
        """Sends a signal until the rank says the word."""
        for _ in range(int(WATCHDOG / 3)):
            self.signal(rank, number)
            if self._channels[rank].poll(3.0):
                break
        self.expect([rank], word)

    def replace(self, rank: int) -> int:
        """Starts a rank anew that has ended; its exit code."""
        self._processes[rank].join(GRACE)
        code = self._processes[rank].exitcode
        if code is None:
            raise Failed(self.report(f"rank {rank} doesn't end"))
        self._channels[rank].close()
        self._processes[rank].close()
        self.start(rank)
        return code

    def report(self, problem: str) -> str:
        """The problem, and what every rank said last, did last and where it stands."""
        time.sleep(GRACE)  # for errors that are on their way
        for rank in range(self.world):
            self.signal(rank, signal.SIGCONT)
            self.signal(rank, signal.SIGUSR1)
        time.sleep(1.0)
        lines = [problem]
        for rank, process in enumerate(self._processes):
            code = process.exitcode
            lines.append(f"--- rank {rank}: " + ("running" if code is None else f"ended: {code}"))
            with contextlib.suppress(EOFError, OSError):
                while self._channels[rank].poll():
                    lines.append("said {}: {}".format(*self._channels[rank].recv()))
            lines += self._file("log", rank).read_text().splitlines()[-LOG_LINES:]
            lines.append(self._file("stacks", rank).read_text())
        return "\n".join(lines)

    def close(self) -> None:
        """Kills what is left."""
        for process in self._processes:
            if process is not None:
                process.kill()  # stopped ones too
                process.join()
                process.close()
        for channel in self._channels:
            channel.close()
        self._folder.cleanup()


class Stage:
    """What a fault needs of the parent."""

    def __init__(self, ranks: Ranks, fault: Fault, members: tuple[int, ...]) -> None:
        self.fault, self.members, self.victim = fault, members, fault.victim
        self.others = [rank for rank in members if rank != fault.victim]
        self.expect, self.insist = ranks.expect, ranks.insist
        self.signal, self.tell = ranks.signal, ranks.tell
