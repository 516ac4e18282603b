"""Progress, table, JSON and plot; only rank 0 comes here."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import coconet_ops as co

from .limits import CopyLimit, placement
from .model import Case, Problem
from .timing import Interval, median_interval
from .units import format_ranks, format_size, format_time

PLAIN_WIDTH = 120  # of the table where the output is no terminal
BUSY = 1.0  # load average before the run that makes its times doubtful


@dataclass(frozen=True)
class Row:
    """One candidate at one problem."""

    op: str
    dtype: str
    layout: str
    unit: str
    count: int  # elements
    bytes: int
    world: int
    candidate: str
    peer: str
    baseline: bool  # the fastest configuration of its peer
    calls_per_sample: int
    seconds: list[float]  # per call: one number for each sample
    first_call: list[float]
    ping_ns: list[float]
    moved_bytes: float
    bus_factor: float
    speedup: dict[str, Interval]  # by peer, over its fastest configuration
    best_peer: str  # the peer that has the fastest configuration of all

    @property
    def time(self) -> float:
        return statistics.median(self.seconds)

    @property
    def size(self) -> int:
        return self.count if self.unit == "parameters" else self.bytes

    @property
    def algbw(self) -> float:
        """GB/s, as nccl-tests define it: bytes of the op over its time."""
        return self.bytes / self.time / 1e9

    @property
    def busbw(self) -> float:
        return self.algbw * self.bus_factor

    @property
    def moved(self) -> float:
        """GB/s that a rank must load and store, over the time taken."""
        return self.moved_bytes / self.time / 1e9

    @property
    def speedup_over_best(self) -> Interval | None:
        """Over the fastest configuration of all peers; None in a peer's own row."""
        return self.speedup.get(self.best_peer)

    @property
    def placement(self) -> str:
        return placement(self.ping_ns)


class Reporter:
    """Shows progress and results on rank 0; silent on the others."""

    def __init__(self, comm: co.Communicator, problems: int) -> None:
        self._rows: list[Row] = []
        self._comm = comm
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        self._console = Console(quiet=comm.rank != 0, width=width)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=comm.rank != 0,
            transient=True,
            auto_refresh=False,  # a thread that draws would disturb the samples
        )
        self._task = self._progress.add_task("copy limit", total=problems)
        self._load = os.getloadavg()[0]  # of the last minute, so mostly not ours

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start(self, case: Case, problem: Problem, number: int) -> None:
        """A row begins with its check."""
        self._title = _title(case, problem)
        self._number = number
        self._progress.update(self._task, description=f"{self._title}: check", refresh=True)

    def without(self, peer: str) -> None:
        """A peer can do the row's op, but not this dtype."""
        self._console.print(f"{self._title}: without {peer}, which can't do this dtype")

    def step(self, share: float) -> None:
        """So much of the row's repetitions or time is used up."""
        self._progress.update(
            self._task,
            description=self._title,
            completed=self._number + min(share, 1.0),
            refresh=True,
        )

    def add(self, rows: list[Row]) -> None:
        """A row is done."""
        self._rows += rows
        times = ", ".join(f"{row.candidate} {format_time(row.time)}" for row in rows)
        self._console.print(f"{self._title}: {times}", highlight=False, soft_wrap=True)

    def finish(self, limit: CopyLimit, oversubscribed: bool, settings: dict[str, object]) -> None:
        """Table, JSON and plot."""
        self._progress.stop()
        if self._comm.rank:
            return
        for _, group in groupby(self._rows, key=lambda row: (row.op, row.dtype)):
            rows = list(group)
            self._console.print(_table(rows, limit))
            if len(_peers(rows)) > 1:
                self._console.print(_peer_table(rows))
        self._console.print(
            f"copy limit: {limit.moved:.1f} GB/s loaded and stored by each rank "
            f"({limit.way}, {limit.copied:.1f} GB/s copied, all ranks at once)"
        )
        if oversubscribed:
            self._console.print("ranks share cores: times include waiting for the scheduler")
        if self._load > BUSY:
            self._console.print(f"the machine was busy before this run (load {self._load:.1f})")
        json_path, plot_path = Path(str(settings.pop("json"))), Path(str(settings.pop("plot")))
        record = {
            "settings": settings,
            "machine": _machine() | {"load_before": self._load},
            "world_size": self._comm.world_size,
            "oversubscribed": oversubscribed,
            "copy_limit": {
                "way": limit.way,
                "copied_gbps": limit.copied,
                "moved_gbps": limit.moved,
                "samples_copied_gbps": limit.gbps,
            },
            "rows": [_record(row, limit) for row in self._rows],
        }
        json_path.write_text(json.dumps(record, indent=1) + "\n")
        from .plot import draw  # matplotlib is slow to load, and only rank 0 draws

        draw(self._rows, limit.moved * 1e9, plot_path)
        self._console.print(f"written: {json_path}, {plot_path}")


def _title(case: Case, problem: Problem) -> str:
    dtype = str(problem.dtype).removeprefix("torch.")
    if case.unit == "parameters":
        return f"{problem.op} {dtype} {format_size(problem.count)} {problem.layout}"
    return f"{problem.op} {dtype} {format_size(problem.bytes)}"


def _table(rows: list[Row], limit: CopyLimit) -> Table:
    optimizer = rows[0].unit == "parameters"
    peers = _peers(rows)
    table = _new_table(rows, "")
    for heading in ("time", "first call", *_rates(optimizer), "copy limit"):
        longest_word = max(map(len, heading.split()))  # headings may wrap, but stay whole
        table.add_column(heading, justify="right", min_width=longest_word)
    if peers:
        against = "best peer" if len(peers) > 1 else peers[0]
        table.add_column(f"vs {against}", justify="right", no_wrap=True)
    table.add_column("cores")
    for _, group in groupby(rows, key=lambda row: (row.layout, row.size)):
        for number, row in enumerate(group):
            rates = (row.count / row.time / 1e6, row.moved) if optimizer else (row.algbw, row.busbw)
            table.add_row(
                _size(row) if number == 0 else "",
                row.candidate,
                format_time(row.time),
                format_time(statistics.median(row.first_call)),
                *(_rate(rate) for rate in rates),
                f"{row.moved / limit.moved:.0%}" if row.moved_bytes else "",
                *([_speedup(row)] if peers else []),
                row.placement if number == 0 else "",
                style="bold" if not row.peer else None,
            )
        table.add_section()
    return table


def _peer_table(rows: list[Row]) -> Table:
    """How coconet compares with each of several peers."""
    peers = _peers(rows)
    table = _new_table(rows, ": times faster than each peer's fastest configuration")
    for peer in peers:
        table.add_column(peer, justify="right")
    for _, group in groupby(rows, key=lambda row: (row.layout, row.size)):
        for number, row in enumerate(row for row in group if not row.peer):
            ratios = (row.speedup.get(peer) for peer in peers)
            table.add_row(
                _size(row) if number == 0 else "",
                row.candidate,
                *(f"{_times(ratio.median)}x" if ratio else "" for ratio in ratios),
            )
        table.add_section()
    return table


def _new_table(rows: list[Row], topic: str) -> Table:
    first = rows[0]
    table = Table(
        title=f"{first.op} {first.dtype}, {format_ranks(first.world)}{topic}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,  # long names and many columns must fit
        pad_edge=False,
    )
    table.add_column("params" if first.unit == "parameters" else "bytes", no_wrap=True)
    table.add_column("candidate", no_wrap=True)
    return table


def _peers(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.peer for row in rows if row.peer))


def _size(row: Row) -> str:
    return format_size(row.size) + (f" {row.layout}" if row.unit == "parameters" else "")


def _rates(optimizer: bool) -> tuple[str, str]:
    return ("Mparam/s", "moved GB/s") if optimizer else ("algbw GB/s", "busbw GB/s")


def _rate(rate: float) -> str:
    return f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"


def _speedup(row: Row) -> str:
    if row.baseline and row.peer == row.best_peer:
        return "baseline"
    ratio = row.speedup_over_best
    return f"{_times(ratio.median)}x [{_times(ratio.low)}-{_times(ratio.high)}]" if ratio else ""


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else _rate(ratio)


def _record(row: Row, limit: CopyLimit) -> dict[str, object]:
    return asdict(row) | {
        "time": asdict(median_interval(row.seconds)),
        "algbw_gbps": row.algbw,
        "busbw_gbps": row.busbw,
        "parameters_per_second": row.count / row.time if row.unit == "parameters" else None,
        "copy_limit_fraction": row.moved / limit.moved,
        "speedup_over_best": asdict(row.speedup_over_best) if row.speedup else None,
        "placement": row.placement,
    }


def _machine() -> dict[str, object]:
    with open("/proc/cpuinfo") as lines:
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(models),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "coconet_ops": co.build_info(),
    }
