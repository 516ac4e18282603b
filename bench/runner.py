"""What every rank does: for each row check, then measure; rank 0 shows and writes the results."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

import coconet_ops as co

from . import cases, peers
from .check import check
from .limits import CopyLimit, Cores
from .model import Buffers, Candidate, Case, Problem
from .peers import Peer
from .report import Reporter, Row
from .sidecar import Sidecar
from .timing import Effort, Samples, best_of_peers, measure


@dataclass(frozen=True)
class Settings:
    """The command line, in a form that travels to the ranks."""

    ops: tuple[str, ...]
    sizes: dict[str, tuple[int, ...]]
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    peers: tuple[str, ...]
    effort: Effort
    check: bool
    json: str
    plot: str


def run(settings: Settings) -> None:
    """The whole benchmark; collective over the default process group."""
    with co.Communicator() as comm:
        cores, limit, buffers = Cores(comm), CopyLimit(comm), Buffers(comm)
        problems = list(_problems(settings, comm))
        with contextlib.ExitStack() as stack:
            sources = _sources(settings, comm, cores, stack)
            reporter = stack.enter_context(Reporter(comm, len(problems)))
            for number, (case, problem) in enumerate(problems):
                if number in (0, len(problems) // 2):
                    limit.sample()
                reporter.start(case, problem, number)
                reporter.add(_measure(case, problem, settings, buffers, sources, cores, reporter))
                gc.collect()  # candidates hold heap tensors in closures; the next row reuses them
            limit.sample()
            reporter.finish(limit, cores.oversubscribed, asdict(settings))


def _sources(
    settings: Settings, comm: co.Communicator, cores: Cores, stack: contextlib.ExitStack
) -> list[Peer | Sidecar]:
    """What gives the peers' candidates: the peers, or their processes."""
    found = peers.find()
    sources = [
        stack.enter_context(Sidecar(peer, comm, cores)) if peer.library else peer
        for peer in (found[name] for name in settings.peers)
    ]
    for source in sources:
        if isinstance(source, Sidecar):
            source.connect()
    return sources


def _problems(settings: Settings, comm: co.Communicator) -> Iterator[tuple[Case, Problem]]:
    found = cases.find()
    for op in settings.ops:
        case = found[op]
        for dtype in (getattr(torch, name) for name in settings.dtypes):
            for layout in case.layouts:
                if layout in settings.layouts or case.layouts == ("flat",):
                    for size in settings.sizes[op]:
                        count = case.count(size, dtype, comm.world_size)
                        yield case, Problem(op, dtype, layout, count, comm)


def _measure(
    case: Case,
    problem: Problem,
    settings: Settings,
    buffers: Buffers,
    sources: list[Peer | Sidecar],
    cores: Cores,
    reporter: Reporter,
) -> list[Row]:
    candidates = case.candidates(problem, buffers)
    for source in sources:
        own = source.candidates(problem, buffers)
        if not own and problem.op in source.ops:
            reporter.without(source.name)
        candidates += own
    if settings.check:
        expected = case.expected(problem)
        for candidate in candidates:
            check(problem, candidate, expected, case.checked_calls)
    samples = measure(candidates, problem.comm, settings.effort, cores, reporter.step)
    return _rows(case, problem, candidates, samples)


def _rows(case: Case, problem: Problem, candidates: list[Candidate], samples: Samples) -> list[Row]:
    best = best_of_peers(candidates, samples)
    best_peer = min(best, key=lambda peer: samples.time(best[peer]), default="")
    return [
        Row(
            op=problem.op,
            dtype=str(problem.dtype).removeprefix("torch."),
            layout=problem.layout,
            unit=case.unit,
            count=problem.count,
            bytes=problem.bytes,
            world=problem.world,
            candidate=candidate.name,
            peer=candidate.peer,
            baseline=candidate.name in best.values(),
            calls_per_sample=samples.calls,
            seconds=samples.seconds[candidate.name],
            first_call=samples.first[candidate.name],
            ping_ns=samples.ping_ns,
            moved_bytes=case.moved_bytes(problem),
            bus_factor=case.bus_factor(problem.world),
            speedup={
                peer: samples.ratio(name, candidate.name)
                for peer, name in best.items()
                if not candidate.peer
            },
            best_peer=best_peer,
        )
        for candidate in candidates
    ]
