"""Random calls and random faults on local ranks, with every result and every error checked.

    python -m coconet_ops.testing.stress --minutes 10 --ranks 4

A round is planned from the seed and its number: groups with communicators of their own, calls on
them, one fault (a rank is killed, stopped, interrupted, closes, disagrees, ...), calls on what
survives it, and calls on a new communicator among the survivors. Results must be exact and bitwise
equal on all ranks; errors must have the right class and name the rank and the cause; nobody may
hang; tensors that no failed call was given must be intact; no descriptor, mapping or thread may be
left. The first violation ends the run with exit code 1, the plan, and every rank's log and stack.
"""

from __future__ import annotations

import argparse
import pprint
import random
import signal
import sys
import time
from collections import Counter

from .faults import FAULTS
from .plan import Round, make_round
from .processes import Failed, Ranks, Stage


def play(plan: Round, ranks: Ranks) -> int:
    """One round on all ranks; the number of calls."""
    for rank in range(plan.world):
        ranks.tell(rank, plan)
    fault = plan.fault
    FAULTS[fault.kind].cause(Stage(ranks, fault, plan.groups[fault.group]))
    reports = ranks.expect(plan.survivors, "report")
    if fault.victim not in plan.survivors:
        code, expected = ranks.replace(fault.victim), 0 if fault.kind == "exit" else -signal.SIGKILL
        if code != expected:
            raise Failed(f"rank {fault.victim} ended with {code}, not {expected}")
    compare(plan, reports)
    return sum(report["calls"] for report in reports.values())


def compare(plan: Round, reports: dict[int, dict]) -> None:
    """Every call gave the same bits on all ranks that made it."""
    for call in (*plan.before, *plan.after, *plan.again):
        digests = {
            rank: report["digests"][call.number]
            for rank, report in reports.items()
            if call.number in report["digests"]
        }
        if len({tuple(each) for each in digests.values()}) > 1:
            raise Failed(f"the ranks' results differ: {digests}: {call}")


def describe(plan: Round) -> str:
    fault = plan.fault
    groups = " ".join(str(list(members)) for members in plan.groups)
    details = ", ".join(f"{key} {value}" for key, value in fault.details.items())
    on = f" on rank {fault.victim} of {list(plan.groups[fault.group])}"
    return f"groups {groups}; {fault.kind}{': ' * bool(details)}{details}" + (
        "" if fault.kind == "none" else on
    )


def stress(args: argparse.Namespace) -> int:
    start = time.monotonic()
    faults: Counter[str] = Counter()
    calls = done = 0
    first = 0 if args.round is None else args.round
    last = first if args.round is not None else args.rounds - 1 if args.rounds else sys.maxsize
    print(f"stress: {args.ranks} ranks, seed {args.seed}", flush=True)
    spoken = start
    ranks = Ranks(args.ranks)
    try:
        for number in range(first, last + 1):
            if args.round is None and time.monotonic() - start > 60 * args.minutes:
                break
            plan = make_round(args.seed, number, args.ranks, tuple(args.fault))
            if args.verbose:
                print(f"round {number}: {describe(plan)}", flush=True)
            try:
                calls += play(plan, ranks)
            except Failed as failure:
                command = f"--ranks {args.ranks} --seed {args.seed} --round {number}"
                if args.fault:
                    command += "".join(f" --fault {kind!r}" for kind in args.fault)
                print(f"FAILED in round {number}: {describe(plan)}", pprint.pformat(plan), sep="\n")
                print(failure, f"again with: {command}", sep="\n", flush=True)
                return 1
            done += 1
            faults[plan.fault.kind] += 1
            if time.monotonic() - spoken > 10:
                spoken = time.monotonic()
                print(f"{spoken - start:6.0f} s: {done} rounds, {calls} calls", flush=True)
    finally:
        ranks.close()
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items()))
    print(f"passed: {done} rounds, {calls} calls in {time.monotonic() - start:.0f} s; {kinds}")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m coconet_ops.testing.stress",
        description=__doc__.split("\n\n")[0],
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    parser.add_argument("--rounds", type=int, help="how many rounds at most")
    parser.add_argument("--ranks", type=int, default=3, help="how many processes (default: 3)")
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--round", type=int, help="this round alone, of the seed")
    parser.add_argument(
        "--fault", action="append", default=[], choices=sorted(FAULTS), help="these faults alone"
    )
    parser.add_argument("--verbose", action="store_true", help="a line per round")
    args = parser.parse_args(argv)
    if args.ranks < 1:
        parser.error("--ranks must be at least 1")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(10**6)
    # A terminated run cleans up as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return stress(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
