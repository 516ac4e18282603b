"""Time against size, one panel per op, layout and dtype."""

from __future__ import annotations

from itertools import cycle, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import FuncFormatter, NullLocator  # noqa: E402

from .units import format_ranks, format_size, format_time  # noqa: E402

if TYPE_CHECKING:
    from .report import Row

COLUMNS = 3
PANEL_INCHES = (5.0, 4.2)
OWN_COLORS = ("#0b5fa5", "#2a9d8f", "#8ecae6", "#1d3557")
PEER_COLORS = ("#d1495b", "#edae49", "#9b5de5", "#7f5539", "#6c757d", "#f4845f", "#a3b18a")


def draw(rows: list[Row], moved_per_second: float, path: Path) -> None:
    """Write the plot; the dashed line is the floor at the copy limit."""
    panels = [
        (f"{op} {dtype}" + (f" {layout}" if unit == "parameters" else ""), list(group))
        for (op, layout, dtype, unit), group in groupby(
            rows, key=lambda row: (row.op, row.layout, row.dtype, row.unit)
        )
    ]
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    width, height = PANEL_INCHES
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(width * columns, height * lines),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, group) in zip(axes.flat, panels, strict=False):
        _panel(axis, title, group, moved_per_second)
    figure.suptitle(
        f"{format_ranks(rows[0].world)}, {moved_per_second / 1e9:.1f} GB/s copy limit per rank"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(axis: Axes, title: str, rows: list[Row], moved_per_second: float) -> None:
    own, peers = cycle(OWN_COLORS), cycle(PEER_COLORS)
    for name, points in _lines(rows).items():
        peer = bool(points[0].peer)
        axis.plot(
            [row.size for row in points],
            [row.time for row in points],
            marker="s" if peer else "o",
            markersize=4,
            color=next(peers if peer else own),
            label=f"{name}, best configuration" if peer else name,
        )
    for row in _winners(rows):
        axis.annotate(
            f"{row.speedup_over_best.median:.1f}×",
            (row.size, row.time),
            xytext=(0, -12),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=OWN_COLORS[0],
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        )
    floor = {row.size: row.moved_bytes / moved_per_second for row in rows if row.moved_bytes}
    if floor:
        axis.plot(*zip(*floor.items(), strict=True), "k--", linewidth=1, label="floor in RAM")
    axis.set(title=title, xlabel=rows[0].unit, ylabel="time per call", xscale="log", yscale="log")
    axis.set_xticks(sorted({row.size for row in rows}))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(size)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_time(seconds)))
    axis.margins(x=0.1, y=0.15)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _lines(rows: list[Row]) -> dict[str, list[Row]]:
    """Each candidate of coconet, but only the fastest configuration of each peer."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if not row.peer or row.baseline:
            lines.setdefault(row.peer or row.candidate, []).append(row)
    return lines


def _winners(rows: list[Row]) -> list[Row]:
    """coconet's fastest candidate at each size, where there is a baseline."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.speedup:
            best[row.size] = min(best.get(row.size, row), row, key=lambda row: row.time)
    return list(best.values())
