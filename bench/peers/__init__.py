"""One file per peer; a new file that defines `PEER` is found by itself.

A peer's module must import without its library: `missing` says what is lacking, and the factories
import it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..model import Buffers, Candidate, Problem

Factory = Callable[[Problem, Buffers], list[Candidate]]


@dataclass(frozen=True)
class Peer:
    """Another library that does the same job, unfused.

    A factory gives every configuration worth trying; the fastest of a run is the baseline.
    """

    name: str
    missing: Callable[[], str | None]  # None where the peer can run, else the reason
    factories: Mapping[str, Factory]  # by op

    def candidates(self, problem: Problem, buffers: Buffers) -> list[Candidate]:
        factory = self.factories.get(problem.op)
        found = factory(problem, buffers) if factory else []
        for candidate in found:
            candidate.peer = self.name
        return found


def find() -> dict[str, Peer]:
    """All peers by name, whether they can run or not."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    peers = [importlib.import_module(f"{__name__}.{name}").PEER for name in names]
    return {peer.name: peer for peer in peers}
