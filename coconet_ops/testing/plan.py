"""What happens in a round of the stress program: drawn from a seed, known to all ranks."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

COMPUTE = ("float32", "bfloat16", "float16")
REDUCE = (*COMPUTE, "float64", "int32", "int64")
ANY = (*REDUCE, "uint8", "bool")
OPS = ("all_reduce", "all_reduce_", "reduce_scatter", "all_gather", "adam", "optimizer")
STAGED = ("enter", "publish", "reduce", "exit")

# The kinds of faults (faults.py), by weight.
FAULTS = {
    "none": 2,
    "kill": 4,
    "kill in phase": 4,
    "exit": 1,
    "close": 1,
    "raise": 1,
    "forget": 1,
    "destroy": 1,
    "no memory": 1,
    "stop": 2,
    "pause": 2,
    "pause all": 1,
    "interrupt wait": 2,
    "interrupt": 3,
    "disagree": 3,
    "bad argument": 3,
    "full heap": 1,
    "creation": 2,
}
DISAGREEMENTS = ("shape", "dtype", "op", "call", "lr", "empty")
BAD_ARGUMENTS = ("dtype", "type", "op", "dim", "size", "empty", "lr", "device")
CREATIONS = ("heap_bytes", "bad heap_bytes", "check", "timeout")


@dataclass(frozen=True)
class Call:
    """One collective call, by all ranks of a group."""

    number: int  # within the round
    group: int  # index into Round.groups
    op: str
    seed: int  # of its data
    dtype: str
    shape: tuple[int, ...]
    heap: tuple[bool, ...]  # by rank of the group: whether its tensor lies in the heap
    strided: bool
    options: dict[str, Any]


@dataclass(frozen=True)
class Fault:
    kind: str  # a key of FAULTS
    group: int  # whose communicator it hits
    victim: int  # global rank
    calls: list[Call]  # of that group, during which it happens
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    seed: int
    number: int
    world: int
    groups: tuple[tuple[int, ...], ...]  # global ranks; the first one is the world
    check: bool  # COCONET_CHECK
    liveness: str
    first_epoch: int  # where the communicators' counters start
    before: list[Call]
    fault: Fault
    after: list[Call]  # on the communicators that survive the fault
    again: list[Call]  # on a new one among the survivors

    @property
    def survivors(self) -> tuple[int, ...]:
        gone = self.fault.kind in ("kill", "kill in phase", "exit")
        return tuple(r for r in range(self.world) if not gone or r != self.fault.victim)


def make_round(seed: int, number: int, world: int, faults: tuple[str, ...] = ()) -> Round:
    """The plan of a round. faults: the kinds to choose from; all if empty."""
    rng = random.Random(f"{seed}/{number}/{world}")
    groups = [tuple(range(world))]
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        groups.append(tuple(sorted(rng.sample(range(world), rng.randint(1, world)))))
    numbers = itertools.count()

    def calls(count: int, group: int | None = None, members: int | None = None) -> list[Call]:
        drawn = []
        for _ in range(count):
            g = rng.randrange(len(groups)) if group is None else group
            drawn.append(_draw_call(rng, next(numbers), g, members or len(groups[g])))
        return drawn

    fault = _draw_fault(rng, groups, calls, faults)
    plan = Round(
        seed=seed,
        number=number,
        world=world,
        groups=tuple(groups),
        check=fault.kind in ("disagree", "creation") or rng.random() < 0.9,
        liveness="heartbeat" if rng.random() < 0.1 else "auto",
        first_epoch=2**32 - rng.randint(1, 60) if rng.random() < 0.1 else 0,
        before=calls(rng.randint(0, 12)),
        fault=fault,
        after=calls(rng.randint(0, 6)),
        again=[],
    )
    plan.again.extend(calls(3, group=0, members=len(plan.survivors)))
    return plan


def _draw_fault(rng, groups, calls, kinds) -> Fault:
    weights = {kind: FAULTS[kind] for kind in kinds or FAULTS}
    kind = rng.choices(list(weights), list(weights.values()))[0]
    several = [g for g, members in enumerate(groups) if len(members) > 1]
    if not several:
        kind = "none"
    group = rng.choice(several) if several else 0
    details: dict[str, Any] = {}
    if kind == "kill in phase":
        details["phase"] = rng.choice(STAGED)
    elif kind in ("kill", "interrupt"):
        details["moment"] = rng.uniform(0, 0.06)
    elif kind in ("pause", "pause all"):
        details["seconds"] = rng.uniform(0.02, 0.3) if kind == "pause" else 4.0
    elif kind == "disagree":
        details["about"] = rng.choice(DISAGREEMENTS)
    elif kind == "bad argument":
        details["what"] = rng.choice(BAD_ARGUMENTS)
    elif kind == "creation":
        details["what"] = rng.choice(CREATIONS)
    return Fault(
        kind=kind,
        group=group,
        victim=rng.choice(groups[group]),
        calls=calls(rng.randint(1, 4), group=group),
        details=details,
    )


def _draw_call(rng, number: int, group: int, members: int) -> Call:
    op = rng.choices([*OPS, "empty", "barrier"], [4, 4, 4, 4, 2, 1, 3, 1])[0]
    place = rng.choice(["heap", "private", "mixed"])
    dtypes = {
        "all_gather": ANY,
        "empty": ANY,
        "adam": COMPUTE,
        "optimizer": COMPUTE,
    }.get(op, REDUCE)
    dtype = rng.choice(dtypes)
    return Call(
        number=number,
        group=group,
        op=op,
        seed=rng.randrange(2**31),
        dtype=dtype,
        shape=_draw_shape(rng),
        heap=tuple(
            place == "heap" or place == "mixed" and rng.random() < 0.5 for _ in range(members)
        ),
        strided=rng.random() < 0.15,
        options={
            "op": "sum" if dtype.startswith("int") else rng.choice(["sum", "avg"]),
            "dim": rng.randrange(2),
            "split": rng.choice(["tensor_split", "chunk"]),
            "steps": rng.randint(1, 3),
        },
    )


def _draw_shape(rng) -> tuple[int, int]:
    """Nothing, one element, odd numbers, KB, up to 2 MB of float32."""
    most = rng.choices([0, 1, 9, 999, 30_000, 500_000], [1, 2, 4, 6, 6, 1])[0]
    columns = rng.choice([1, 1, 3, 64])
    return rng.randint(most // 2, most) // columns + (most == 1), columns
