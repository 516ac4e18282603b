"""A rank of the stress program: a process that plays round after round."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .faults import FAULTS
from .plan import Round
from .resources import leaked, resources
from .session import Session, Unexpected


class Link:
    """To the parent."""

    def __init__(self, channel, log_file) -> None:
        self._channel = channel
        self._log_file = log_file

    def tell(self, word: str, value: Any = None) -> None:
        self.log(f"told the parent: {word}")
        self._channel.send((word, value))

    def told(self) -> bool:
        """Whether the parent has told this rank something since."""
        if not self._channel.poll():
            return False
        self._channel.recv()
        return True

    def wait_to_be_told(self) -> Any:
        return self._channel.recv()

    def log(self, text: str) -> None:
        self._log_file.write(f"{time.monotonic():.3f} {text}\n")


def serve(rank: int, folder: str, channel, stacks: str, log: str) -> None:
    with open(stacks, "w") as report, open(log, "w", buffering=1) as log_file:
        faulthandler.register(signal.SIGUSR1, file=report, all_threads=True)
        faulthandler.enable(file=report)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
        torch.set_num_threads(1)
        gc.freeze()  # collecting torch's own objects takes a quarter of a second
        link = Link(channel, log_file)
        with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
            while True:
                plan = link.wait_to_be_told()
                link.log(f"round {plan.number}")
                try:
                    link.tell("report", play(plan, rank, folder, link))
                except Exception:
                    link.tell("broken", traceback.format_exc())
        os._exit(0)  # torch's destructors may wait for peers


def play(plan: Round, rank: int, folder: str, link: Link) -> dict[str, Any]:
    meet(f"{folder}/{plan.number}", range(plan.world), rank)
    groups = [dist.group.WORLD]
    for members in plan.groups[1:]:
        group = dist.new_group(list(members))
        groups.append(group if rank in members else None)
    for group in groups:
        warm_up(group)
    before = resources()
    session = Session(plan, rank, groups, link)
    session.run(plan.before)
    link.log(f"fault: {plan.fault.kind} {plan.fault.details} on rank {plan.fault.victim}")
    suffer(session)
    session.close()
    check_leaks(before, rank)
    if dist.is_initialized():
        dist.destroy_process_group()

    link.log("meeting the survivors")
    meet(f"{folder}/{plan.number}-again", plan.survivors, rank)
    warm_up(dist.group.WORLD)
    before = resources()
    again = Session(plan, rank, [dist.group.WORLD], link)
    again.run(plan.again)
    again.close()
    check_leaks(before, rank)
    dist.destroy_process_group()
    return {
        "digests": {**session.digests, **again.digests},
        "calls": session.calls + again.calls,
    }


def suffer(session: Session) -> None:
    """The fault, and what it leaves to be done."""
    fault, groups = session.fault, session.plan.groups
    kind = FAULTS[fault.kind]
    if session.rank == fault.victim:
        kind.strike(session)
    elif session.rank in groups[fault.group]:
        kind.witness(session)
    session.check_held()
    closed = [fault.group] if kind.closes else []
    gone = [g for g, members in enumerate(groups) if kind.gone and fault.victim in members]
    if session.rank != fault.victim:
        session.check_lost([g for g in gone if g not in closed], fault.victim)
    for g in {*closed, *gone}:
        session.comms.pop(g, None)
    session.run(session.plan.after)


def meet(file: str, members, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=list(members).index(rank),
        world_size=len(members),
        timeout=timedelta(seconds=60),
    )


def warm_up(group) -> None:
    """What gloo opens at the first use is open from here on."""
    if group is not None:
        dist.all_gather_object([None] * dist.get_world_size(group), 0, group=group)


def check_leaks(before, rank: int) -> None:
    more = leaked(before)
    if more:
        raise Unexpected(f"rank {rank} still holds {more}")
