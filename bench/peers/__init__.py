"""One file per peer; a new file that defines `PEER` is found by itself. `_*.py` are shared parts.

A peer's module must import without its library: `missing` says what is lacking, and the factories
import it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..model import Buffers, Candidate, Problem

Factory = Callable[[Problem, Buffers], list[Candidate]]
INSTALL = "not installed; `make bench-peers` installs it"


class Library(Protocol):
    """What a rank can't load beside others, so that it gets processes of its own (sidecar.py)."""

    rank: int
    world_size: int

    def launcher(self, ranks: int, oversubscribed: bool) -> tuple[list[str], dict[str, str]]:
        """The command that starts a program on so many ranks, and its environment variables."""

    def start(self) -> None:
        """In a process of its own: join the other ranks."""

    def barrier(self) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class Peer:
    """Another library that does the same job, unfused.

    A factory gives every configuration worth trying; the fastest of a run is the baseline.
    """

    name: str
    missing: Callable[[], str | None]  # None where the peer can run, else the reason
    factories: Mapping[str, Factory]  # by op; no candidates where it lacks the dtype
    library: Library | None = None

    @property
    def ops(self) -> set[str]:
        return set(self.factories)

    def candidates(self, problem: Problem, buffers: Buffers) -> list[Candidate]:
        factory = self.factories.get(problem.op)
        found = factory(problem, buffers) if factory else []
        for candidate in found:
            candidate.peer = self.name
        return found


def find() -> dict[str, Peer]:
    """All peers by name, whether they can run or not."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    names = sorted(name for name in modules if not name.startswith("_"))
    peers = [importlib.import_module(f"{__name__}.{name}").PEER for name in names]
    return {peer.name: peer for peer in peers}
