"""Samples and their statistics.

A sample is a barrier, then a few calls back to back; its time is that of the slowest rank. The
candidates take turns inside each repetition, in rotating order, so that whatever disturbs the
machine disturbs all of them, and a ratio is taken between samples of the same repetition.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import coconet_ops as co

from .limits import Cores
from .model import Candidate

MIN_REPETITIONS = 9  # the fewest whose second-smallest and second-largest bound the median at 95 %
SAMPLE_SECONDS = 0.05  # calls per sample are reduced until the slowest candidate takes this


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    calls: int
    warmup: int
    repetitions: int
    seconds: float
    width: float  # half-width of the intervals, relative to the median, that is narrow enough


@dataclass
class Samples:
    """Of one problem: for each candidate, one number per repetition."""

    calls: int = 1  # per sample
    seconds: dict[str, list[float]] = field(default_factory=dict)  # per call, slowest rank
    first: dict[str, list[float]] = field(default_factory=dict)  # the first call after the barrier
    ping_ns: list[float] = field(default_factory=list)  # before each repetition and after the last

    def time(self, name: str) -> float:
        """The median."""
        return statistics.median(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> Interval:
        """How many times faster `fast` is than `slow`."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return median_interval([a / b for a, b in pairs])


@dataclass(frozen=True)
class Interval:
    """A median with its confidence interval."""

    low: float
    median: float
    high: float

    def narrower_than(self, width: float) -> bool:
        return self.high - self.low <= 2 * width * self.median


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Median and order-statistic interval; free of assumptions on the distribution.

    Fewer than 6 values can't reach 95 %: the interval is then their range.
    """
    ordered = sorted(values)
    n = len(ordered)
    cut, tail = 0, 0.5**n  # tail: chance that at most `cut` of n values lie below the true median
    while 2 * tail <= 1 - confidence:
        cut += 1
        tail += math.comb(n, cut) * 0.5**n
    cut = max(0, cut - 1)
    return Interval(ordered[cut], statistics.median(ordered), ordered[n - 1 - cut])


def measure(
    candidates: Sequence[Candidate],
    comm: co.Communicator,
    effort: Effort,
    cores: Cores,
    progress: Callable[[float], None],
) -> Samples:
    """Repeat until every ratio's interval is narrow or a limit is reached; collective."""
    samples = Samples(calls=_calls_per_sample(candidates, comm, cores, effort))
    for candidate in candidates:
        samples.seconds[candidate.name] = []
        samples.first[candidate.name] = []
    cores.pin()
    samples.ping_ns.append(cores.ping())

    start = time.perf_counter()
    for repetition in range(effort.repetitions):
        turn = repetition % len(candidates)
        own: dict[str, tuple[float, float]] = {}
        for candidate in [*candidates[turn:], *candidates[:turn]]:
            own[candidate.name] = _sample(candidate, comm, cores, samples.calls)
        cores.pin()
        numbers = [x for candidate in candidates for x in own[candidate.name]]
        elapsed = time.perf_counter() - start
        *slowest, elapsed, ping_ns = _slowest_rank([*numbers, elapsed, cores.ping()])
        for candidate, first, total in zip(candidates, slowest[::2], slowest[1::2], strict=True):
            samples.first[candidate.name].append(first)
            samples.seconds[candidate.name].append(total / samples.calls)
        samples.ping_ns.append(ping_ns)
        # all ranks hold the same numbers here, so they stop together
        if repetition + 1 >= MIN_REPETITIONS and _settled(candidates, samples, effort.width):
            break
        if elapsed > effort.seconds:
            break
        progress(max((repetition + 1) / effort.repetitions, elapsed / effort.seconds))
    return samples


def _sample(
    candidate: Candidate, comm: co.Communicator, cores: Cores, calls: int
) -> tuple[float, float]:
    """Seconds of the first call and of all calls, on this rank."""
    cores.pin(candidate.pinned)
    return candidate.sample(comm.barrier, calls)


def _calls_per_sample(
    candidates: Sequence[Candidate], comm: co.Communicator, cores: Cores, effort: Effort
) -> int:
    slowest = 0.0
    for candidate in candidates:
        calls = [_sample(candidate, comm, cores, 1)[0] for _ in range(effort.warmup)]
        slowest = max(slowest, min(calls, default=0.0))
    (slowest,) = _slowest_rank([slowest])
    return max(1, min(effort.calls, int(SAMPLE_SECONDS / max(slowest, 1e-9))))


def _slowest_rank(numbers: list[float]) -> list[float]:
    shared = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.tolist()


def _settled(candidates: Sequence[Candidate], samples: Samples, width: float) -> bool:
    """Whether the ratios that will be reported are known well enough."""
    peers = best_of_peers(candidates, samples)
    names = [c.name for c in candidates if not c.peer]
    return all(
        samples.ratio(best, name).narrower_than(width) for best in peers.values() for name in names
    )


def best_of_peers(candidates: Sequence[Candidate], samples: Samples) -> dict[str, str]:
    """The fastest configuration of each peer: the baseline."""
    best: dict[str, str] = {}
    for candidate in candidates:
        if candidate.peer:
            other = best.setdefault(candidate.peer, candidate.name)
            best[candidate.peer] = min(other, candidate.name, key=samples.time)
    return best
