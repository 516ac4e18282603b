"""One rank's part in a round: its communicators, its calls, the tensors that it holds."""

from __future__ import annotations

import gc
import os
import random
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch

import coconet_ops as co

from .calls import WrongResult, digest, perform
from .plan import Call, Round
from .resources import resources

HEAP_BYTES = 256 << 20
LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=2)  # where a fault is to run into the timeout


class Unexpected(AssertionError):
    """Not the error that the plan calls for."""


class Seen(NamedTuple):
    """The error that a call ended with; empty when it returned."""

    error: str
    message: str


def attempt(call: Callable[[], Any]) -> Seen:
    try:
        call()
    except WrongResult:
        raise
    except BaseException as error:
        return Seen(type(error).__name__, str(error))
    return Seen("", "")


class Session:
    """rank: the global one. groups: the plan's process groups, None where not a member."""

    def __init__(self, plan: Round, rank: int, groups: list, link) -> None:
        self.plan, self.rank, self.link = plan, rank, link
        self.groups = groups
        self.own = random.Random(f"{plan.seed}/{plan.number}/{rank}")  # what no other rank knows
        self.held: list[tuple[torch.Tensor, str]] = []
        self.digests: dict[int, list[str]] = {}
        self.calls = 0
        self.comms: dict[int, co.Communicator] = {}
        os.environ["COCONET_CHECK"] = "1" if plan.check else "0"
        for g, group in enumerate(groups):
            if group is not None:
                self.comms[g] = self.communicator(g)

    def communicator(self, g: int, **options: Any) -> co.Communicator:
        short = g == self.plan.fault.group and self.plan.fault.kind in ("stop", "pause all")
        arguments = {
            "heap_bytes": HEAP_BYTES,
            "timeout": SHORT if short else LONG,
            "_liveness": self.plan.liveness,
            "_first_epoch": self.plan.first_epoch,
        }
        return co.Communicator(self.groups[g], **{**arguments, **options})

    # --- calls -----------------------------------------------------------------------------------

    def run(self, calls: list[Call]) -> None:
        """Performs those of the calls that this rank has a communicator for."""
        for call in calls:
            if call.group in self.comms:
                self.digests[call.number] = [digest(x) for x in self.perform(call)]

    def perform(self, call: Call) -> list[torch.Tensor]:
        self.link.log(f"call {call.number}: {call.op} on group {call.group}")
        result, same = perform(call, self.comms[call.group])
        self.calls += 1
        if result is not None and self.own.random() < 0.3:
            self.held.append((result, digest(result)))
        # Each rank drops others, and at other times.
        while len(self.held) > 6 or self.held and self.own.random() < 0.2:
            self.held.pop(self.own.randrange(len(self.held)))
        return same

    def once(self) -> None:
        """Performs the fault's calls, and some that go through all phases."""
        for call in self.fault.calls:
            self.perform(call)
        co.all_reduce(torch.ones(100_000), group=self.comm)
        self.comm.barrier()

    def loop(self, announce: bool = False, until_told: bool = False) -> Seen:
        """Performs the fault's calls over and over until one raises, or until the parent has told
        the first rank of the group that it is enough. What was raised."""
        comm = self.comm
        while True:
            seen = attempt(self.once)
            if seen.error:
                return seen
            if announce:
                self.link.tell("looping")
                announce = False
            if until_told:
                enough = torch.tensor([float(comm.rank == 0 and self.link.told())])
                if co.all_reduce(enough, group=comm) > 0:
                    return seen

    # --- the fault's communicator ----------------------------------------------------------------

    @property
    def fault(self):
        return self.plan.fault

    @property
    def comm(self) -> co.Communicator:
        return self.comms[self.fault.group]

    def rank_of(self, rank: int) -> int:
        """The rank in the fault's group of a global rank."""
        return self.plan.groups[self.fault.group].index(rank)

    def must_see(self, seen: Seen, error: str | tuple[str, ...], *patterns: str) -> None:
        """The error's class is this, and its message contains each of the patterns."""
        errors = (error,) if isinstance(error, str) else error
        missing = [p for p in patterns if not re.search(p, seen.message)]
        if seen.error not in errors or missing:
            raise Unexpected(
                f"rank {self.rank} saw {seen.error or 'no error'}: {seen.message!r}; expected "
                f"{' or '.join(errors)} with {list(patterns)}; missing: {missing}"
            )

    def must_be_closed(self, seen: Seen, error: str) -> None:
        """The fault's communicator is closed and repeats what was seen first."""
        for call in (self.comm.barrier, lambda: co.all_reduce(torch.ones(3), group=self.comm)):
            self.must_see(attempt(call), error, re.escape(seen.message))
        if not self.comm.closed:
            raise Unexpected(f"rank {self.rank}: the communicator is open after {seen}")

    # --- afterwards ------------------------------------------------------------------------------

    def check_held(self) -> None:
        for x, before in self.held:
            if digest(x) != before:
                raise WrongResult(
                    f"rank {self.rank}: a tensor of shape {list(x.shape)} that no call was given "
                    "has changed"
                )
        shared = [name for name in resources()["mappings"] if name.startswith("/dev/shm")]
        if shared:
            raise WrongResult(f"rank {self.rank} has mapped {shared}")

    def check_lost(self, lost: list[int], victim: int) -> None:
        """The victim is gone from these groups too: their next call says so."""
        for g in lost:
            if g in self.comms:
                pattern = rf"\brank {self.plan.groups[g].index(victim)}\b"
                self.must_see(attempt(self.comms[g].barrier), "PeerLostError", pattern)

    def close(self) -> None:
        """Closes or forgets every communicator. Tensors of the heap outlive them."""
        comms = list(self.comms.values())
        self.comms.clear()
        self.own.shuffle(comms)
        while comms:
            comm = comms.pop()
            if self.own.random() < 0.7:
                comm.close()
            del comm
        gc.collect()
        self.check_held()
        self.held.clear()
