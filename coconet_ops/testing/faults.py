"""What goes wrong in a round, and what every rank must see of it.

A fault hits one rank of a group, the victim. `strike` runs on the victim, `witness` on the other
members, `cause` in the parent, which sends the signals. Ranks of other groups go on meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import coconet_ops as co

from .calls import WrongResult
from .resources import no_more_memory
from .session import HEAP_BYTES, Session, attempt


class Fault:
    closes = True  # the communicator is closed on all members afterwards
    gone = False  # the victim is lost to its other groups as well
    error = "PeerLostError"  # what the other members get

    def strike(self, session: Session) -> None:
        raise NotImplementedError

    def witness(self, session: Session) -> None:
        """Calls until the error comes, and looks at it."""
        self.check(session, session.loop())

    def cause(self, stage) -> None:
        """Nothing to do for a fault that the victim causes itself."""

    def check(self, session: Session, seen, *patterns: str) -> None:
        victim = session.rank_of(session.fault.victim)
        own = rf"on rank {session.comm.rank}\b"
        session.must_see(seen, self.error, own, rf"\brank {victim}\b", *patterns)
        session.must_be_closed(seen, self.error)


class Nothing(Fault):
    closes = False

    def strike(self, session):
        pass

    def witness(self, session):
        pass


# --- a rank that dies or leaves ------------------------------------------------------------------


class Kill(Fault):
    """At any moment."""

    gone = True

    def strike(self, session):
        session.loop(announce=True)

    def witness(self, session):
        seen = session.loop(announce=True)
        self.check(session, seen, r"\bdied\b")

    def cause(self, stage):
        stage.expect(stage.members, "looping")
        time.sleep(stage.fault.details["moment"])
        stage.signal(stage.victim, signal.SIGKILL)


class KillInPhase(Fault):
    """When it is about to tell its peers of some progress."""

    gone = True

    def strike(self, session):
        session.comm._inject_fault(session.fault.details["phase"], signal.SIGKILL)
        session.loop()

    def witness(self, session):
        self.check(session, session.loop(), r"\bdied\b")


class Exit(Fault):
    gone = True

    def strike(self, session):
        os._exit(0)


class Close(Fault):
    def strike(self, session):
        session.comm.close()
        session.must_see(attempt(session.comm.barrier), "CommunicatorError", "close")

    def witness(self, session):
        self.check(session, session.loop(), r"\bclosed\b")


class Raise(Close):
    """An exception of the user's own, out of `with comm`."""

    def strike(self, session):
        with contextlib.suppress(ZeroDivisionError), session.comm:
            raise ZeroDivisionError
        session.must_see(attempt(session.comm.barrier), "CommunicatorError", "close")


class Forget(Close):
    """The last reference goes."""

    def strike(self, session):
        del session.comms[session.fault.group]
        gc.collect()


class Destroy(Close):
    gone = True

    def strike(self, session):
        dist.destroy_process_group()
        for comm in session.comms.values():
            session.must_see(attempt(comm.barrier), "CommunicatorError", "close")


class NoMemory(Fault):
    """The victim's call fails inside: no memory for the result."""

    def strike(self, session):
        x = torch.ones(16 << 20)  # larger than what malloc keeps
        with no_more_memory():
            seen = attempt(lambda: co.all_reduce(x, group=session.comm))
        session.must_see(seen, ("RuntimeError", "MemoryError"), "memory")
        again = attempt(session.comm.barrier)
        session.must_see(again, "CommunicatorError", "failed inside the call: .*memory")

    def witness(self, session):
        x = torch.ones(16 << 20)
        seen = attempt(lambda: co.all_reduce(x, group=session.comm))
        self.check(session, seen, "failed inside the call: .*memory")


# --- a rank that stops ---------------------------------------------------------------------------


class Stop(Fault):
    """For longer than the timeout. Back again, it learns that the others gave up."""

    error = "CommunicatorTimeout"

    def strike(self, session):
        session.comm._inject_fault("enter", signal.SIGSTOP)
        seen = session.loop()
        session.must_see(seen, ("CommunicatorTimeout", "PeerLostError"), r"\brank \d+ reported")
        session.must_be_closed(seen, seen.error)
        session.link.tell("failed")

    def witness(self, session):
        self.check(session, session.loop(), r"\bphase \w+: expected \d+, seen \d+")
        session.link.tell("failed")

    def cause(self, stage):
        stage.expect(stage.others, "failed")
        stage.insist(stage.victim, signal.SIGCONT, "failed")


class Pause(Fault):
    """For less than the timeout: nobody notices."""

    closes = False

    def strike(self, session):
        session.must_see(session.loop(announce=True, until_told=True), "")

    witness = strike

    def cause(self, stage):
        stage.expect(stage.members, "looping")
        stage.signal(stage.victim, signal.SIGSTOP)
        time.sleep(stage.fault.details["seconds"])
        stage.signal(stage.victim, signal.SIGCONT)
        stage.tell(stage.members[0])


class PauseAll(Fault):
    """All ranks stop for longer than the timeout, as by Ctrl-Z, while the others wait for the
    victim. Nobody has waited meanwhile."""

    closes = False

    def strike(self, session):
        session.link.tell("waiting")
        session.link.wait_to_be_told()
        session.must_see(attempt(session.once), "")

    def witness(self, session):
        session.link.tell("waiting")
        session.must_see(attempt(session.once), "")

    def cause(self, stage):
        stage.expect(stage.members, "waiting")
        time.sleep(0.1)
        for rank in stage.members:
            stage.signal(rank, signal.SIGSTOP)
        time.sleep(stage.fault.details["seconds"])
        for rank in stage.members:
            stage.signal(rank, signal.SIGCONT)
        time.sleep(0.1)  # for the others to look at the clock
        stage.tell(stage.victim)


# --- a rank that is interrupted ------------------------------------------------------------------


class Interrupt(Fault):
    """Ctrl-C at any moment; the victim leaves `with comm`, as a user's program would."""

    pattern = "interrupted while waiting|closed"

    def strike(self, session):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with session.comm:
                seen = self.be_interrupted(session)
                if seen.error == "KeyboardInterrupt":
                    raise KeyboardInterrupt
                session.must_see(seen, "KeyboardInterrupt")
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        again = attempt(session.comm.barrier)
        session.must_see(again, "CommunicatorError", "interrupted while waiting|close")
        session.link.tell("failed")

    def be_interrupted(self, session):
        return session.loop(announce=True)

    def witness(self, session):
        self.check(session, session.loop(announce=True), self.pattern)

    def cause(self, stage):
        stage.expect(stage.members, "looping")
        time.sleep(stage.fault.details["moment"])
        stage.insist(stage.victim, signal.SIGINT, "failed")


class InterruptWait(Interrupt):
    """Ctrl-C while it waits for the others."""

    def be_interrupted(self, session):
        session.link.tell("waiting")
        return session.loop()

    def witness(self, session):
        session.link.wait_to_be_told()
        self.check(session, session.loop(), self.pattern)

    def cause(self, stage):
        stage.expect([stage.victim], "waiting")
        time.sleep(0.1)
        stage.insist(stage.victim, signal.SIGINT, "failed")
        for rank in stage.others:
            stage.tell(rank)


# --- calls that are refused: the communicator stays usable ---------------------------------------


class Disagree(Fault):
    """The victim calls something else."""

    closes = False

    def strike(self, session):
        self.call(session, odd=True)

    def witness(self, session):
        self.call(session, odd=False)

    def call(self, session, odd):
        comm = session.comm
        x = torch.ones(100)
        if all(session.fault.calls[0].heap):
            x = comm.empty(100).fill_(1)
        params = [torch.ones(5), torch.ones(70)]
        state = co.AdamState(params, group=comm)
        call, usual, unusual = {
            "shape": (
                lambda: co.all_reduce_(x[: 90 + 10 * odd], group=comm),
                r"\[90\]",
                r"\[100\]",
            ),
            "dtype": (
                lambda: co.all_reduce(x.half() if odd else x, group=comm),
                "float32",
                "float16",
            ),
            "op": (
                lambda: co.all_reduce(x, op="avg" if odd else "sum", group=comm),
                "sum",
                "avg",
            ),
            "call": (
                lambda: comm.barrier() if odd else co.all_gather(x, group=comm),
                "all_gather",
                "barrier",
            ),
            "lr": (
                lambda: co.rs_adam_ag_(params, params, state, lr=0.5 if odd else 0.25),
                r"0\.25",
                r"0\.5",
            ),
            "empty": (lambda: comm.empty(1000 + 24 * odd), "4000", "4096"),
        }[session.fault.details["about"]]
        victim = session.rank_of(session.fault.victim)
        seen = attempt(call)
        session.must_see(seen, "MismatchError", rf"{usual} on rank", rf"{unusual} on rank {victim}")
        if not all((t == 1).all() for t in (x, *params)):
            raise WrongResult(f"rank {session.rank}: a refused call has written")


class BadArgument(Fault):
    """The victim is told by an exception of its own, the others which rank it was, and why."""

    closes = False

    def strike(self, session):
        comm, x, step = session.comm, torch.ones(6, 2), adam_step(session.comm)
        call, error, pattern = {
            "dtype": (lambda: co.all_reduce(x.short(), group=comm), "TypeError", "int16"),
            "type": (lambda: co.all_gather([1.0], group=comm), "TypeError", "list"),
            "op": (lambda: co.all_reduce_(x, op="max", group=comm), "ValueError", "max"),
            "dim": (lambda: co.reduce_scatter(x, dim=7, group=comm), "ValueError", "7"),
            "size": (lambda: co.all_gather(x, size=-5, group=comm), "ValueError", "-5"),
            "empty": (lambda: comm.empty(-3), "ValueError", "-3"),
            "lr": (lambda: step(-1.0), "ValueError", r"-1\.0"),
            "device": (lambda: co.all_reduce(x.to("meta"), group=comm), "ValueError", "meta"),
        }[session.fault.details["what"]]
        session.must_see(attempt(call), error, pattern)

    def witness(self, session):
        comm, x, step = session.comm, torch.ones(6, 2), adam_step(session.comm)
        call = {
            "type": lambda: co.all_gather(x, group=comm),
            "size": lambda: co.all_gather(x, group=comm),
            "dim": lambda: co.reduce_scatter(x, group=comm),
            "empty": lambda: comm.empty(3),
            "lr": lambda: step(1.0),
        }.get(session.fault.details["what"], lambda: co.all_reduce_(x, group=comm))
        victim = session.rank_of(session.fault.victim)
        seen = attempt(call)
        session.must_see(seen, "MismatchError", rf"\brank {victim} was given bad arguments: ")
        if not (x == 1).all():
            raise WrongResult(f"rank {session.rank}: a refused call has written")


def adam_step(comm):
    """step(lr) of a small list of parameters. Collective."""
    params, grads = [torch.ones(5), torch.ones(70)], [torch.ones(5), torch.ones(70)]
    state = co.AdamState(params, group=comm)
    return lambda lr: co.rs_adam_ag_(params, grads, state, lr=lr)


class FullHeap(Fault):
    """A tensor that doesn't fit, on all ranks."""

    closes = False

    def strike(self, session):
        seen = attempt(lambda: session.comm.empty(HEAP_BYTES // 4 + 1))
        session.must_see(seen, "MemoryError", "heap_bytes")

    witness = strike


class Creation(Fault):
    """The victim's arguments of a new communicator are bad or others: nobody gets one."""

    closes = False
    WRONG = {
        "heap_bytes": {"heap_bytes": 2 * HEAP_BYTES},
        "bad heap_bytes": {"heap_bytes": -1},
        "timeout": {"timeout": timedelta(0)},
        "check": {},
    }
    PATTERN = {
        "heap_bytes": "disagree on heap_bytes",
        "bad heap_bytes": r"rank \d+: heap_bytes is -1",
        "timeout": r"rank \d+: timeout is 0:00:00",
        "check": "disagree on COCONET_CHECK",
    }

    def strike(self, session):
        what = session.fault.details["what"]
        if what == "check":
            os.environ["COCONET_CHECK"] = "0"
        self.create(session, **self.WRONG[what])
        os.environ["COCONET_CHECK"] = "1"

    def witness(self, session):
        self.create(session)

    def create(self, session, **options):
        seen = attempt(lambda: session.communicator(session.fault.group, **options))
        session.must_see(seen, "CommunicatorError", self.PATTERN[session.fault.details["what"]])


FAULTS: dict[str, Fault] = {
    "none": Nothing(),
    "kill": Kill(),
    "kill in phase": KillInPhase(),
    "exit": Exit(),
    "close": Close(),
    "raise": Raise(),
    "forget": Forget(),
    "destroy": Destroy(),
    "no memory": NoMemory(),
    "stop": Stop(),
    "pause": Pause(),
    "pause all": PauseAll(),
    "interrupt wait": InterruptWait(),
    "interrupt": Interrupt(),
    "disagree": Disagree(),
    "bad argument": BadArgument(),
    "full heap": FullHeap(),
    "creation": Creation(),
}
