"""Every op on virtual ranks of one device, beside unfused torch in the same process.

The ranks share the device's memory, so a call can't beat the copy bandwidth on the bytes that it
must move; how close it comes is what this measures. All candidates do the work of all ranks.

    python -m bench.one_gpu --seconds 120 --json result.json
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import coconet_ops as co

from .timing import MIN_REPETITIONS, Interval, median_interval
from .units import format_size, format_time

REPETITIONS = 15
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CHECKED_AT_ONCE = 1 << 22  # elements, so that the float64 answer needs little memory
# Of one rounding of the result, as in the tests.
TOLERANCE = {
    torch.float32: {"rtol": 2**-21, "atol": 4e-6},
    torch.bfloat16: {"rtol": 1.01 * 2**-8, "atol": 4e-6},
}
# AdamW.step() of torch has float32 products in another order.
ADAM_TOLERANCE = {"rtol": 1.01 * 2**-8, "atol": 2e-6}


class Device:
    """A GPU, whose time is taken by events, or the emulator, by the clock on the wall."""

    def __init__(self, name: str) -> None:
        self.emulated = name == "emulated"
        self.options: dict = {"device": "cpu" if self.emulated else name}
        if self.emulated:
            sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
            from harness import emulated_backend

            self.options["_backend"] = emulated_backend()
            self.options["_launch"] = {"blocks": 2, "threads": 64}
        else:
            torch.cuda.set_device(torch.device(name))
        self.torch = torch.device(self.options["device"])
        self.sample_seconds = 0.0 if self.emulated else 0.01

    def communicator(self, world: int, heap_bytes: int) -> co.LocalCommunicator:
        return co.LocalCommunicator(world, heap_bytes=heap_bytes, **self.options)

    def head_start(self) -> None:
        """Keeps the stream busy for about a millisecond, so that what follows is queued before it
        runs: the first call's way to the device isn't timed."""
        if not self.emulated:
            torch.cuda._sleep(2_000_000)

    def synchronize(self) -> None:
        if not self.emulated:
            torch.cuda.synchronize()

    def stopwatch(self) -> Stopwatch | Events:
        return Stopwatch() if self.emulated else Events()

    def room(self, nbytes: int) -> bool:
        return self.emulated or nbytes < 0.9 * torch.cuda.mem_get_info()[0]

    def describe(self) -> dict:
        build = co.build_info()
        result = {
            "device": "emulated",
            "torch": torch.__version__,
            "nvcc": build["cuda"]["nvcc"],
            "architectures": build["cuda"]["architectures"],
        }
        if not self.emulated:
            properties = torch.cuda.get_device_properties(self.torch)
            result["device"] = properties.name
            result["multiprocessors"] = properties.multi_processor_count
            result["memory"] = properties.total_memory
            result["driver"] = _driver()
        return result


class Stopwatch:
    """Seconds between start() and stop(), of what has ended by then."""

    def start(self) -> None:
        self._from = time.perf_counter()

    def stop(self) -> None:
        self._to = time.perf_counter()

    def seconds(self) -> float:
        return self._to - self._from


class Events:
    """The same on a GPU's current stream; seconds() waits."""

    def __init__(self) -> None:
        self._from, self._to = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        self._from.record()

    def stop(self) -> None:
        self._to.record()

    def seconds(self) -> float:
        self._to.synchronize()
        return self._from.elapsed_time(self._to) / 1e3


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(command, text=True, timeout=20).splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


# --- candidates ----------------------------------------------------------------------------------


@dataclass
class Sample:
    seconds: float  # of the device, per call
    host_seconds: float  # of rank 0's thread, per call


class Unfused:
    """Torch's own operations for all ranks, one after another on one stream."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name, self.call = name, call

    def sample(self, device: Device, calls: int) -> Sample:
        device.synchronize()
        watch = device.stopwatch()
        device.head_start()
        watch.start()
        begin = time.perf_counter()
        for _ in range(calls):
            self.call()
        host = time.perf_counter() - begin
        watch.stop()
        return Sample(watch.seconds() / calls, host / calls)


class Fused:
    """The op on all ranks, each in its thread. call(rank)."""

    name = "coconet"

    def __init__(self, local: co.LocalCommunicator, call: Callable[[int], object]) -> None:
        self.local, self.call = local, call

    def once(self) -> None:
        self.local.run(lambda comm: self.call(comm.rank) and None)

    def sample(self, device: Device, calls: int) -> Sample:
        watch = device.stopwatch()

        def work(comm: co.Communicator) -> float:
            call, rank = self.call, comm.rank
            comm.barrier()
            if rank == 0:
                device.head_start()
                watch.start()
            begin = time.perf_counter()
            for _ in range(calls):
                call(rank)
            host = time.perf_counter() - begin
            # A call returns once it is launched for all ranks.
            if rank == 0:
                watch.stop()
            comm.barrier()
            return host

        host = self.local.run(work)[0]
        return Sample(watch.seconds() / calls, host / calls)


class Graph:
    """The same calls captured in a CUDA graph: no host between them. Sampled in multiples of
    `length` calls."""

    name = "coconet, CUDA graph"
    length = 20

    def __init__(self, fused: Fused) -> None:
        self.graph = torch.cuda.CUDAGraph()

        def work(comm: co.Communicator) -> None:
            for _ in range(self.length):
                fused.call(comm.rank)

        # The ranks' threads launch on the stream that this thread captures.
        with torch.cuda.graph(self.graph, capture_error_mode="relaxed"):
            fused.local.run(work)

    def sample(self, device: Device, calls: int) -> Sample:
        replays = max(1, calls // self.length)
        sample = Unfused("", self.graph.replay).sample(device, replays)
        return Sample(sample.seconds / self.length, sample.host_seconds / self.length)


@dataclass
class Case:
    """One op and size. make returns the fused call, the unfused candidates, and a check to be
    called after one call of the fused one."""

    op: str
    world: int
    dtype: torch.dtype
    numel: int  # of a rank's tensor; all_gather: of the result
    layout: str
    make: Callable[[Case, Device], Made]
    heap_bytes: int  # per rank
    other_bytes: int  # outside the heaps, all ranks together

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def moved(self) -> int:
        """Bytes that must be read and written, for all ranks together; see FORMULAS."""
        n, w = self.nbytes, self.world
        if self.op == "all_reduce":
            return 2 * w * n
        if self.op in ("reduce_scatter", "all_gather"):
            return (w + 1) * n
        state = 24 if self.dtype != torch.float32 else 20  # moments; masters, or weights read
        return 2 * w * n + state * self.numel

    def title(self) -> str:
        size = format_size(self.numel if self.op == "rs_adam_ag" else self.nbytes)
        what = f"{self.op} {str(self.dtype).removeprefix('torch.')} {size}"
        return f"{what} {self.layout}".strip() + f", {self.world} ranks"


FORMULAS = {
    "all_reduce": "W*N read, W*N written (N: bytes of a rank's tensor, W: ranks)",
    "reduce_scatter": "W*N read, N written",
    "all_gather": "N read, W*N written (N: bytes of the result)",
    "rs_adam_ag": "W*N of gradients and 12 bytes per parameter of moments and masters read, W*N of "
    "weights and 12 (fp32 weights: 8) bytes per parameter of state written (N: bytes of the "
    "parameters)",
}


@dataclass
class Made:
    local: co.LocalCommunicator
    call: Callable[[int], object]
    unfused: list[Unfused]
    check: Callable[[], None]


def _inputs(case: Case, device: Device, numel: int, rank: int) -> Tensor:
    generator = torch.Generator(device.torch).manual_seed(rank)
    x = torch.empty(numel, dtype=case.dtype, device=device.torch)
    return x.normal_(generator=generator)


def _in_heaps(local: co.LocalCommunicator, sources: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each rank's tensor in its heap."""

    def work(comm: co.Communicator) -> Tensor:
        source = sources[comm.rank]
        return comm.empty(source.numel(), dtype=source.dtype).copy_(source)

    return local.run(work)


def _assert_close(actual: Tensor, expected: Tensor, tolerance: dict, what: str) -> None:
    wrong = ~torch.isclose(actual.double(), expected, **tolerance)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {actual.double()[at].item()} where {expected[at].item()} is right"
        )


def _spans(numel: int) -> list[slice]:
    return [slice(at, at + CHECKED_AT_ONCE) for at in range(0, numel, CHECKED_AT_ONCE)]


def _sum64(xs: Sequence[Tensor], span: slice) -> Tensor:
    total = xs[0][span].double()
    for x in xs[1:]:
        total += x[span].double()
    return total


def _sum(xs: Sequence[Tensor], out: Tensor) -> None:
    if len(xs) == 1:
        out.copy_(xs[0])
        return
    torch.add(xs[0], xs[1], out=out)
    for x in xs[2:]:
        out.add_(x)


def make_all_reduce(case: Case, device: Device) -> Made:
    local = device.communicator(case.world, case.heap_bytes)
    xs = _in_heaps(local, [_inputs(case, device, case.numel, r) for r in range(case.world)])
    outs = [torch.empty_like(x) for x in xs]
    results: list = [None] * case.world

    def call(rank: int) -> None:
        results[rank] = co.all_reduce(xs[rank], group=local.ranks[rank])

    def sum_of_its_own() -> None:
        for out in outs:
            _sum(xs, out)

    def sum_and_copies() -> None:
        _sum(xs, outs[0])
        for out in outs[1:]:
            out.copy_(outs[0])

    def check() -> None:
        for span in _spans(case.numel):
            expected = _sum64(xs, span)
            for rank, y in enumerate(results):
                _assert_close(y[span], expected, TOLERANCE[case.dtype], f"rank {rank}")

    unfused = [
        Unfused("torch: a sum on each rank", sum_of_its_own),
        Unfused("torch: one sum, copied", sum_and_copies),
    ]
    return Made(local, call, unfused, check)


def make_reduce_scatter(case: Case, device: Device) -> Made:
    local = device.communicator(case.world, case.heap_bytes)
    xs = _in_heaps(local, [_inputs(case, device, case.numel, r) for r in range(case.world)])
    parts = [x.tensor_split(case.world) for x in xs]
    outs = [torch.empty_like(part) for part in parts[0]]
    results: list = [None] * case.world

    def call(rank: int) -> None:
        results[rank] = co.reduce_scatter(xs[rank], group=local.ranks[rank])

    def sums() -> None:
        for rank, out in enumerate(outs):
            _sum([part[rank] for part in parts], out)

    def check() -> None:
        for rank, y in enumerate(results):
            slices = [part[rank] for part in parts]
            for span in _spans(y.numel()):
                expected = _sum64(slices, span)
                _assert_close(y[span], expected, TOLERANCE[case.dtype], f"rank {rank}")

    return Made(local, call, [Unfused("torch: sums of slices", sums)], check)


def make_all_gather(case: Case, device: Device) -> Made:
    local = device.communicator(case.world, case.heap_bytes)
    own = case.numel // case.world
    shards = _in_heaps(local, [_inputs(case, device, own, r) for r in range(case.world)])
    outs = [
        torch.empty(case.numel, dtype=case.dtype, device=device.torch) for _ in range(case.world)
    ]
    results: list = [None] * case.world

    def call(rank: int) -> None:
        results[rank] = co.all_gather(shards[rank], size=case.numel, group=local.ranks[rank])

    def cats() -> None:
        for out in outs:
            torch.cat(shards, out=out)

    def check() -> None:
        expected = torch.cat(shards)
        for rank, y in enumerate(results):
            if not torch.equal(y, expected):
                raise AssertionError(f"rank {rank}: the shards are not in the result")

    return Made(local, call, [Unfused("torch: cat", cats)], check)


def split_like_a_model(numel: int, tensors: int = 200) -> list[int]:
    """Sizes of about `tensors` tensors, from small to large; they add up to numel."""
    weights = [(1, 1, 64, 256)[i % 4] for i in range(tensors)]
    sizes = [max(1, numel * weight // sum(weights)) for weight in weights]
    sizes[-1] += numel - sum(sizes)
    if sizes[-1] < 1:
        raise ValueError(f"{numel} elements are too few for {tensors} tensors")
    return sizes


def make_rs_adam_ag(case: Case, device: Device) -> Made:
    local = device.communicator(case.world, case.heap_bytes)
    sizes = [case.numel] if case.layout == "flat" else split_like_a_model(case.numel)
    start = _inputs(case, device, case.numel, 99)

    def in_heap(comm: co.Communicator, source: Tensor) -> list[Tensor]:
        return [comm.empty(x.numel(), dtype=x.dtype).copy_(x) for x in source.split(sizes)]

    def work(comm: co.Communicator) -> tuple:
        params = in_heap(comm, start)
        # Multiples of 1/64, whose sums are exact: Adam's first step is lr * sign(sum), however
        # small the sum is.
        gradient = _inputs(case, device, case.numel, comm.rank).mul_(64).round_().div_(64)
        grads = in_heap(comm, gradient)
        return params, grads, co.AdamState(params, group=comm)

    ranks = local.run(work)
    hyper = {**HYPER, "average_grads": False}

    def call(rank: int) -> None:
        params, grads, state = ranks[rank]
        co.rs_adam_ag_(params, grads, state, **hyper)

    def check() -> None:
        for index, before in enumerate(start.split(sizes)):
            for span in _spans(before.numel()):
                expected = _first_step(
                    before[span].double(), _sum64([grads[index] for _, grads, _ in ranks], span)
                )
                for rank, (params, _, _) in enumerate(ranks):
                    what = f"rank {rank}, parameter {index}"
                    _assert_close(params[index][span], expected, ADAM_TOLERANCE, what)

    on_each = _UnfusedAdam(ranks, start, sizes, case.world)
    sharded = _UnfusedAdam(ranks, start, sizes, 1)
    unfused = [
        Unfused("torch: sum, AdamW(fused) on each rank, cast", on_each.step),
        Unfused("torch: sum, AdamW(fused) once, cast for each rank", sharded.step),
    ]
    return Made(local, call, unfused, check)


def _first_step(p: Tensor, g: Tensor) -> Tensor:
    beta1, beta2 = HYPER["betas"]
    m, v = (1 - beta1) * g / (1 - beta1), (1 - beta2) * g * g / (1 - beta2)
    p = p - HYPER["lr"] * HYPER["weight_decay"] * p
    return p - HYPER["lr"] * m / (v.sqrt() + HYPER["eps"])


class _UnfusedAdam:
    """The gradients' sum in fp32, AdamW on `copies` sets of fp32 masters, and the new weights for
    every rank. copies: the world size, or 1 where the ranks share the work (the ZeRO way)."""

    def __init__(self, ranks: list[tuple], start: Tensor, sizes: list[int], copies: int) -> None:
        self.grads = [grads for _, grads, _ in ranks]
        masters = [
            [torch.nn.Parameter(p.float().clone()) for p in start.split(sizes)]
            for _ in range(copies)
        ]
        self.sums = [torch.empty_like(p) for p in masters[0]]
        for own in masters:
            for p, total in zip(own, self.sums, strict=True):
                p.grad = total
        self.optimizer = torch.optim.AdamW([p for own in masters for p in own], fused=True, **HYPER)
        self.masters = [
            p.detach() for r in range(len(ranks)) for p in masters[r if copies > 1 else 0]
        ]
        self.weights = [torch.empty_like(p) for params, _, _ in ranks for p in params]

    def step(self) -> None:
        # The foreach functions: a few launches for all tensors.
        torch._foreach_copy_(self.sums, self.grads[0])
        for grads in self.grads[1:]:
            torch._foreach_add_(self.sums, grads)
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)


# --- measuring -----------------------------------------------------------------------------------


@dataclass
class Plan:
    """Sizes to measure; numbers of elements of rs_adam_ag, bytes of the others."""

    worlds: tuple[int, ...]
    all_reduce: tuple[int, ...]
    others: tuple[int, ...]
    adam: tuple[int, ...]
    copy_bytes: int
    repetitions: int


PLANS = {
    "cuda": Plan(
        (2, 4, 8),
        (256 << 20, 16 << 20, 1 << 20, 64 << 10, 4 << 10),
        (256 << 20, 16 << 20, 1 << 20),
        (1 << 27, 1 << 24, 1 << 20),
        1 << 30,
        REPETITIONS,
    ),
    "emulated": Plan((2,), (4 << 10, 80 << 10), (4 << 10,), (1 << 14,), 1 << 20, 2),
}


def cases(plan: Plan) -> list[Case]:
    """Large sizes first: they are what the figures of merit are for."""
    found = []
    both = (torch.bfloat16, torch.float32)
    for world in plan.worlds:
        for numel in plan.adam:
            for layout in ("flat", "scattered"):
                heap = 4 * numel + (16 << 20)  # and padding, tables
                other = (2 + 4 + 16 + 12 * world + 2 * world + 2 * world + 24) * numel
                found.append(
                    Case("rs_adam_ag", world, both[0], numel, layout, make_rs_adam_ag, heap, other)
                )
        for dtype in both:
            for nbytes in plan.all_reduce:
                heap, numel = 3 * nbytes + (8 << 20), nbytes // dtype.itemsize
                other = 2 * world * nbytes
                found.append(
                    Case("all_reduce", world, dtype, numel, "", make_all_reduce, heap, other)
                )
        for op, make in (
            ("reduce_scatter", make_reduce_scatter),
            ("all_gather", make_all_gather),
        ):
            for nbytes in plan.others:
                heap, numel = 3 * nbytes + (8 << 20), nbytes // 2
                found.append(Case(op, world, both[0], numel, "", make, heap, world * nbytes))
    return found


@dataclass
class Result:
    case: Case
    calls: int = 1
    seconds: dict[str, list[float]] = field(default_factory=dict)
    host: dict[str, list[float]] = field(default_factory=dict)
    graph: str = ""  # why there is no graph
    tuning: dict[str, int] = field(default_factory=dict)

    def time(self, name: str) -> Interval:
        return median_interval(self.seconds[name])

    def ratio(self, slow: str, fast: str = Fused.name) -> Interval:
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return median_interval([a / b for a, b in pairs])

    @property
    def unfused(self) -> list[str]:
        return [name for name in self.seconds if name.startswith("torch")]

    @property
    def baseline(self) -> str:
        """The fastest of the variants that do what every rank does; rs_adam_ag: the issue's own,
        with AdamW on each rank."""
        if self.case.op == "rs_adam_ag":
            return self.unfused[0]
        return min(self.unfused, key=lambda name: self.time(name).median)

    def rate(self, name: str) -> float:
        """GB/s on the bytes that must move."""
        return self.case.moved / self.time(name).median / 1e9

    def record(self, copy_rate: float) -> dict:
        return {
            "op": self.case.op,
            "ranks": self.case.world,
            "dtype": str(self.case.dtype).removeprefix("torch."),
            "elements": self.case.numel,
            "layout": self.case.layout,
            "moved_bytes": self.case.moved,
            "calls_per_sample": self.calls,
            "baseline": self.baseline,
            "config": self.tuning,
            "no_graph": self.graph,
            "candidates": {
                name: {
                    "seconds": _numbers(self.time(name)),
                    "host_seconds": _numbers(median_interval(self.host[name])),
                    "moved_gb_per_s": self.rate(name),
                    "of_copy": self.rate(name) / copy_rate,
                    "coconet_is_faster_by": _numbers(self.ratio(name)),
                }
                for name in self.seconds
            },
        }


def _numbers(interval: Interval) -> list[float]:
    return [interval.low, interval.median, interval.high]


def copy_rate(device: Device, nbytes: int) -> float:
    """GB/s, read and written, of copying a tensor in the device's memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device.torch)
    target = torch.empty_like(source)
    copy = Unfused("copy", lambda: target.copy_(source))
    copy.sample(device, 3)
    seconds = [copy.sample(device, 5).seconds for _ in range(MIN_REPETITIONS)]
    return 2 * nbytes / median_interval(seconds).median / 1e9


class NoGraph(Exception):
    """Calls can't be captured here."""


def measure(case: Case, device: Device, repetitions: int, no_graph: str) -> Result:
    """Checks the answer, then times all candidates in turns. no_graph: why none is to be tried."""
    made = case.make(case, device)
    with made.local:
        fused = Fused(made.local, made.call)
        fused.once()
        device.synchronize()
        made.check()
        result = Result(case, graph=no_graph, tuning=made.local.ranks[0].tuning)
        candidates: list = [fused, *made.unfused]
        for candidate in candidates:
            candidate.sample(device, 1 if device.emulated else 3)
        if not no_graph:
            try:
                candidates.append(Graph(fused))
            except RuntimeError as error:  # its ranks are closed now
                raise NoGraph(f"{type(error).__name__}: {error}"[:300]) from error
        slowest = max(c.sample(device, 2).seconds for c in candidates)
        result.calls = max(1, min(200, int(device.sample_seconds / max(slowest, 1e-9))))
        for candidate in candidates:
            result.seconds[candidate.name], result.host[candidate.name] = [], []
        for turn in range(repetitions):
            at = turn % len(candidates)
            for candidate in [*candidates[at:], *candidates[:at]]:
                sample = candidate.sample(device, result.calls)
                result.seconds[candidate.name].append(sample.seconds)
                result.host[candidate.name].append(sample.host_seconds)
    return result


def table(results: Sequence[Result], rate: float) -> list[str]:
    lines = [f"{'':44} {'time':>9} {'graph':>9} {'GB/s':>7} {'of copy':>8}  faster than torch"]
    for result in results:
        names = result.seconds
        graph = format_time(result.time(Graph.name).median) if Graph.name in names else "-"
        ratios = [result.ratio(result.baseline)]
        if result.case.op == "rs_adam_ag":
            ratios += [result.ratio(name) for name in result.unfused[1:]]
        faster = ", ".join(f"{r.median:.2f}x ({r.low:.2f}-{r.high:.2f})" for r in ratios)
        lines.append(
            f"{result.case.title():44} {format_time(result.time(Fused.name).median):>9} "
            f"{graph:>9} {result.rate(Fused.name):7.4g} {result.rate(Fused.name) / rate:8.1%}  "
            f"{faster}"
        )
    return lines


def overheads(results: Sequence[Result]) -> list[str]:
    """Of the smallest all_reduce of each world size: the host's time, and the device's alone."""
    lines = []
    small: dict[int, Result] = {}
    for result in results:
        world = result.case.world
        if result.case.op == "all_reduce" and result.case.dtype == torch.float32:
            if world not in small or result.case.nbytes < small[world].case.nbytes:
                small[world] = result
    for world, result in small.items():
        host = median_interval(result.host[Fused.name]).median
        line = f"launch, {world} ranks: {format_time(host)} of the host per call"
        if Graph.name in result.seconds:
            line += f", {format_time(result.time(Graph.name).median)} per call in a graph"
        lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.one_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or emulated to try the program")
    parser.add_argument("--seconds", type=float, default=150, help="no new case after these")
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args(arguments)

    begin = time.monotonic()
    device = Device(options.device)
    plan = PLANS["emulated" if device.emulated else "cuda"]
    rate = copy_rate(device, plan.copy_bytes)
    print(f"copy: {rate:.4g} GB/s read and written", flush=True)
    results: list[Result] = []
    left_out: list[str] = []
    failures: list[str] = []
    description = device.describe()
    no_graph = "the emulator has none" if device.emulated else ""

    def write() -> None:
        record = {
            **description,
            "copy_gb_per_s": rate,
            "moved_bytes": FORMULAS,
            "cases": [result.record(rate) for result in results],
            "left_out": left_out,
            "failures": failures,
        }
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")

    for case in cases(plan):
        if time.monotonic() - begin > options.seconds:
            left_out.append(f"{case.title()}: no time left")
            continue
        if not device.room(case.world * case.heap_bytes + case.other_bytes):
            left_out.append(f"{case.title()}: the device has too little free memory")
            continue
        try:
            try:
                result = measure(case, device, plan.repetitions, no_graph)
            except NoGraph as error:
                no_graph = str(error)
                print(f"no CUDA graphs: {no_graph}", flush=True)
                result = measure(case, device, plan.repetitions, no_graph)
            results.append(result)
            print(table(results[-1:], rate)[1], flush=True)
        except (AssertionError, RuntimeError, MemoryError, co.CommunicatorError) as error:
            failures.append(f"{case.title()}: {type(error).__name__}: {error}"[:400])
            print(f"FAILED {failures[-1]}", flush=True)
        gc.collect()
        if not device.emulated:
            torch.cuda.empty_cache()
        write()  # each time: what there is survives if the program is ended
    write()
    print("\n".join(["", *table(results, rate), "", *overheads(results)]))
    print("rs_adam_ag: faster than AdamW on each rank, and than AdamW once for all ranks")
    for line in left_out:
        print(f"left out: {line}")
    for line in failures:
        print(f"FAILED {line}")
    return 1 if failures or not results else 0


if __name__ == "__main__":
    sys.exit(main())
