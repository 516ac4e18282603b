"""Command line of `coconet-bench`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .units import parse_size

DTYPES = ("float32", "bfloat16", "float16")
FOLDER = Path("bench-results")
EXTRAS = ("rich", "matplotlib")

METHOD = """\
method:
  Each rank has a core and a thread of its own. Answers are checked against float64 before any
  timing. A sample is a barrier, then up to ITERS calls back to back; its time is the slowest
  rank's, divided by the calls. 'first call' is the first one after the barrier: gloo's threads
  sleep between calls, and waking them costs 0.5 to 2 ms. The candidates take turns, in rotating
  order. A speedup is the median of the ratios of paired samples, with its 95 % interval, against
  the peer's fastest configuration in this run. 'copy limit' compares the bytes that a rank must
  load and store with those that copying 64 MB moves in the same run; in the caches more than
  100 % is possible. 'cores' is near when a flag goes from rank 0 to rank 1 and back in less than
  250 ns. See bench/README.md.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `coconet-bench`; returns the exit code."""
    lacking = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if lacking:
        names = " and ".join(lacking)
        print(f"coconet-bench needs {names}: pip install coconet_ops[bench]", file=sys.stderr)
        return 1

    from rich.console import Console

    from . import cases, peers
    from .launch import INTERRUPTED, launch
    from .runner import Settings, run
    from .timing import Effort

    found_cases, found_peers = cases.find(), peers.find()
    parser = _parser(tuple(found_cases), tuple(found_peers))
    options = parser.parse_args(arguments)

    chosen_peers = []
    for name in found_peers if options.vs == ["all"] else options.vs:
        if reason := found_peers[name].missing():
            if options.vs != ["all"]:
                parser.error(f"--vs {name}: {reason}")
            print(f"without {name}: {reason}")
        else:
            chosen_peers.append(name)
    ops = tuple(found_cases) if options.op == "all" else (options.op,)
    settings = Settings(
        ops=ops,
        sizes={op: _sizes(options, found_cases[op].sizes, parser) for op in ops},
        dtypes=tuple(options.dtype),
        layouts=tuple(options.layout),
        peers=tuple(chosen_peers),
        effort=Effort(
            calls=options.iters,
            warmup=options.warmup,
            repetitions=options.repetitions,
            seconds=options.seconds,
            width=options.width / 100,
        ),
        check=options.check,
        json=str(_writable(options.json or FOLDER / f"{options.op}.json", parser)),
        plot=str(_writable(options.plot or FOLDER / f"{options.op}.png", parser)),
    )
    code = launch(run, settings, options.ranks)
    if code:
        Console().show_cursor()  # rank 0 may have died while it drew its progress
    if code == INTERRUPTED:
        print("\ninterrupted", file=sys.stderr)
    return code


def _parser(ops: tuple[str, ...], peers: tuple[str, ...]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coconet-bench",
        description="Time every fused op beside its unfused baseline on local ranks.",
        epilog=METHOD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("op", choices=(*ops, "all"), metavar="OP", help=f"{', '.join(ops)} or all")
    add(
        "--ranks",
        type=_positive,
        default=2,
        metavar="N",
        help="local ranks to start (default 2); under torchrun its ranks are used",
    )
    size = "4K, 16M, 1G; rs_adam_ag counts parameters, the other ops bytes"
    add("-b", "--minbytes", type=parse_size, metavar="MINBYTES", help=f"smallest size: {size}")
    add("-e", "--maxbytes", type=parse_size, metavar="MAXBYTES", help="largest size (default: -b)")
    add("-f", "--stepfactor", type=_factor, default=4, metavar="FACTOR", help="between sizes (4)")
    add(
        "-n",
        "--iters",
        type=_positive,
        default=20,
        metavar="ITERS",
        help="calls per sample (20); fewer where they take longer than 50 ms",
    )
    add(
        "-w",
        "--warmup",
        type=_natural,
        default=2,
        metavar="WARMUP",
        help="calls of each candidate before timing (2)",
    )
    add(
        "--dtype",
        type=_choices(DTYPES),
        default=["float32"],
        metavar="LIST",
        help=f"of {','.join(DTYPES)} (float32)",
    )
    add(
        "--layout",
        type=_choices(("flat", "bert")),
        default=["flat", "bert"],
        metavar="LIST",
        help="rs_adam_ag: flat, one tensor; bert, 200 tensors shaped like BERT's (flat,bert)",
    )
    add(
        "--vs",
        type=_choices((*peers, "all")),
        default=["gloo"],
        metavar="LIST",
        help=f"peers to compare with: {','.join(peers)}, or all that can run (gloo)",
    )
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with float64 before timing (on); a wrong answer ends the run",
    )
    add("--seconds", type=float, default=8, help="of sampling per row at most (8)")
    add("--repetitions", type=_positive, default=100, help="per row at most (100)")
    add(
        "--width",
        type=float,
        default=5,
        metavar="PERCENT",
        help="a row ends when its speedups are known to this half-width (5)",
    )
    add("--json", type=Path, metavar="FILE", help=f"results (default {FOLDER}/OP.json)")
    add("--plot", type=Path, metavar="FILE", help=f"plot, PNG (default {FOLDER}/OP.png)")
    return parser


def _sizes(
    options: argparse.Namespace, defaults: tuple[int, ...], parser: argparse.ArgumentParser
) -> tuple[int, ...]:
    if options.minbytes is None and options.maxbytes is None:
        return defaults
    smallest = options.minbytes or defaults[0]
    largest = options.maxbytes or smallest
    if smallest > largest:
        parser.error(f"-b {smallest} is larger than -e {largest}")
    sizes = [smallest]
    while sizes[-1] * options.stepfactor <= largest:
        sizes.append(sizes[-1] * options.stepfactor)
    return tuple(sizes)


def _writable(path: Path, parser: argparse.ArgumentParser) -> Path:
    """Find out before the measurement, not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"can't write {path}: {error.strerror}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        parser.error(f"can't write {path}")
    return path


def _choices(allowed: tuple[str, ...]):
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"'{name}' is not one of {', '.join(allowed)}")
        return names

    return parse


def _natural(text: str) -> int:
    return _at_least(0, text)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _factor(text: str) -> int:
    return _at_least(2, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {least} on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
