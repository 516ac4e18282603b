"""A rank that dies, stops, leaves or is interrupted: every survivor gets an error, and soon."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import cases
import pytest
import torch
import torch.distributed as dist
from harness import (
    Ranks,
    gather_objects,
    raised,
    run_fresh,
    run_script,
    values,
    wait_for,
)

import coconet_ops as co
from coconet_ops.testing.resources import leaked, no_more_memory, resources

MIB = 1 << 20
PROMPT = 5.0  # seconds: finds hangs; the measured time is in the test report
STAGED = ("enter", "publish", "reduce")
DIRECT = ("enter", "exit")
PHASES = [("private", phase) for phase in STAGED] + [("heap", phase) for phase in DIRECT]


class AllReduce:
    name = "all_reduce"

    def __init__(self, comm, placement):
        self.comm = comm
        self.x, _ = cases.placed(comm, torch.ones(100_000), placement)

    def __call__(self):
        co.all_reduce_(self.x, op="avg", group=self.comm)

    def check_readable(self):
        assert self.x.isfinite().all()


class Adam:
    name = "rs_adam_ag_"

    def __init__(self, comm, placement):
        self.params = [cases.placed(comm, torch.ones(n), placement)[0] for n in (100_000, 7)]
        self.grads = [cases.placed(comm, torch.ones(n), placement)[0] for n in (100_000, 7)]
        self.state = co.AdamState(self.params, group=comm)

    def __call__(self):
        co.rs_adam_ag_(self.params, self.grads, self.state, lr=0.1)

    def check_readable(self):
        for x in (*self.params, *self.grads, self.state.exp_avg):
            assert x.isfinite().all()


def survive(kind, placement, phase, number, victim, timeout):
    """Runs ops until the victim, hit by a signal in the given phase, makes one fail. Returns what
    this rank saw."""
    gather_objects(0)
    before = resources()
    comm = co.Communicator(heap_bytes=4 * MIB, timeout=timedelta(seconds=timeout))
    op = kind(comm, placement)
    for _ in range(3):
        op()
    comm.barrier()
    if comm.rank == victim:
        comm._inject_fault(phase, number)
    start = time.monotonic()
    for _ in range(3):  # what was complete when the victim fell may still succeed
        error, message, bases = raised(op)
        if error != "nothing":
            break
    elapsed = time.monotonic() - start
    op.check_readable()
    again = [raised(op), raised(comm.barrier), raised(partial(comm.empty, 3))]
    comm.close()
    closed = comm.closed
    op.check_readable()
    del op, comm
    return {
        "error": error,
        "message": message,
        "bases": bases,
        "elapsed": elapsed,
        "again": again,
        "closed": closed,
        "leaked": leaked(before),
    }


def check_survivor(outcome, kind, victim, expected_error):
    assert outcome.ok, outcome.describe()
    seen = outcome.value
    message = seen["message"]
    assert seen["error"] == expected_error, seen
    assert "CommunicatorError" in seen["bases"]
    assert re.search(rf"\brank {outcome.rank}\b", message), message
    assert re.search(rf"\brank {victim}\b", message), f"the lost rank isn't named: {message}"
    assert kind.name in message, message
    assert re.search(r"phase (enter|publish|reduce|exit)", message), message
    assert re.search(r"expected \d+, seen \d+", message), message
    for error, text, bases in seen["again"]:
        assert "CommunicatorError" in bases, f"the communicator went on working: {error}"
        assert message in text, f"the first cause is not repeated: {text}"
    assert seen["closed"]
    assert seen["leaked"] == {}


def faults(world_size, kind, placement, phase, number, record, timeout=30.0):
    victim = 0 if world_size == 3 else 1
    outcomes = run_fresh(
        world_size, survive, kind, placement, phase, number, victim, timeout, victims=[victim]
    )
    assert len(outcomes) == world_size - 1
    record("elapsed", [round(outcome.value["elapsed"], 3) for outcome in outcomes if outcome.ok])
    return victim, outcomes


@pytest.mark.parametrize(("placement", "phase"), PHASES)
@pytest.mark.parametrize("kind", [AllReduce, Adam], ids=lambda kind: kind.name)
@pytest.mark.parametrize("world_size", [2, 3])
def test_killed_rank_is_lost_to_all_survivors(world_size, kind, placement, phase, record_property):
    victim, outcomes = faults(world_size, kind, placement, phase, signal.SIGKILL, record_property)
    for outcome in outcomes:
        check_survivor(outcome, kind, victim, "PeerLostError")
        assert outcome.value["elapsed"] < PROMPT


@pytest.mark.parametrize(
    ("world_size", "placement", "phase"),
    [(2, *case) for case in PHASES] + [(3, "private", "reduce"), (3, "heap", "exit")],
)
@pytest.mark.parametrize("kind", [AllReduce, Adam], ids=lambda kind: kind.name)
def test_stopped_rank_times_out_on_all_survivors(
    world_size, kind, placement, phase, record_property
):
    timeout = 1.0
    victim, outcomes = faults(
        world_size, kind, placement, phase, signal.SIGSTOP, record_property, timeout
    )
    for outcome in outcomes:
        check_survivor(outcome, kind, victim, "CommunicatorTimeout")
        assert 0.9 * timeout < outcome.value["elapsed"] < timeout + PROMPT


def run_endlessly(comm, ready):
    """Ops of all kinds."""
    ops = [kind(comm, placement) for kind in (AllReduce, Adam) for placement in ("private", "heap")]
    small = torch.ones(10)
    while True:
        for op in ops:
            op()
            op.check_readable()
        comm.empty(1000)
        co.all_gather(small, group=comm)
        Path(ready).touch()


def stream(ready):
    """The error that ends the stream, that of the next call, and what is left."""
    gather_objects(0)
    before = resources()
    comm = co.Communicator(heap_bytes=8 * MIB, timeout=timedelta(seconds=30))
    name, message, _ = raised(partial(run_endlessly, comm, ready))
    again = raised(comm.barrier)
    del comm
    return name, message, again, leaked(before)


@pytest.mark.parametrize("world_size", [2, 3])
def test_kill_at_any_moment(world_size, tmp_path):
    for attempt in range(6):
        ranks = Ranks(world_size)
        ready = tmp_path / str(attempt)
        ranks.start(stream, str(ready))
        wait_for(ready.exists)
        time.sleep(0.0137 * attempt)
        ranks.signal(0, signal.SIGKILL)
        outcomes = ranks.finish(without=[0])
        for outcome in outcomes:
            assert outcome.ok, outcome.describe()
            name, message, again, leaks = outcome.value
            assert name == "PeerLostError" and re.search(r"\brank 0\b", message), (name, message)
            assert again[0] == "PeerLostError" and message in again[1]
            assert leaks == {}
        assert ranks.close() == [-signal.SIGKILL] + [0] * (world_size - 1)


def paused():
    comm = co.Communicator(heap_bytes=4 * MIB, timeout=timedelta(seconds=30))
    x = comm.empty(1000).fill_(1)
    end = time.monotonic() + 1.5
    steps = 0
    while not (co.all_reduce(torch.tensor([float(time.monotonic() > end)]), group=comm) > 0):
        co.all_reduce_(x, op="avg", group=comm)
        assert (x == 1).all()
        steps += 1
    comm.close()
    return steps


@pytest.mark.parametrize("world_size", [2, 3])
def test_stopped_rank_that_continues_in_time_does_no_harm(world_size):
    ranks = Ranks(world_size)
    ranks.start(paused)
    for _ in range(3):
        time.sleep(0.3)
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(0.15)
        ranks.signal(1, signal.SIGCONT)
    steps = values(ranks.finish())
    assert len(set(steps)) == 1 and steps[0] > 0
    assert ranks.close() == [0] * world_size


def suspended(liveness, timeout, ready):
    comm = co.Communicator(heap_bytes=MIB, timeout=timedelta(seconds=timeout), _liveness=liveness)
    Path(f"{ready}-{comm.rank}").touch()
    if comm.rank == 1:  # the other one waits for it
        wait_for(Path(f"{ready}-go").exists)
    return (co.all_reduce(torch.ones(5), group=comm) == 2).all().item()


@pytest.mark.parametrize(("liveness", "timeout"), [("auto", 2), ("heartbeat", 30)])
def test_ranks_that_are_all_stopped_for_long_have_not_waited_meanwhile(tmp_path, liveness, timeout):
    """Ctrl-Z and fg: nobody is late because everybody was away."""
    ranks = Ranks(2)
    ranks.start(suspended, liveness, timeout, str(tmp_path / "ready"))
    for rank in range(2):
        wait_for((tmp_path / f"ready-{rank}").exists)
    time.sleep(0.3)
    for rank in (1, 0):  # rank 0 has seen the last beat of rank 1, and looks before the next one
        ranks.signal(rank, signal.SIGSTOP)
        time.sleep(0.2)
    time.sleep(4)  # longer than the timeout, and than heartbeats may take
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGCONT)
        time.sleep(0.2)
    (tmp_path / "ready-go").touch()
    assert values(ranks.finish()) == [True, True]
    assert ranks.close() == [0, 0]


def beating(victim, number):
    comm = co.Communicator(heap_bytes=MIB, timeout=timedelta(seconds=30), _liveness="heartbeat")
    x = comm.empty(1000).fill_(1)
    time.sleep(0.3)
    co.all_reduce_(x, op="avg", group=comm)
    gather_objects(0)
    if comm.rank == victim:
        os.kill(os.getpid(), number)
    start = time.monotonic()
    error, message, _ = raised(lambda: co.all_reduce_(x, op="avg", group=comm))
    elapsed = time.monotonic() - start
    return error, message, elapsed, raised(comm.barrier)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_heartbeats_find_a_lost_rank_where_there_are_no_pidfds(number):
    for outcome in run_fresh(3, beating, 1, number, victims=[1]):
        assert outcome.ok, outcome.describe()
        error, message, elapsed, again = outcome.value
        assert error == "PeerLostError" and re.search(r"\brank 1\b", message), (error, message)
        assert elapsed < 2 * PROMPT
        assert again[0] == "PeerLostError" and message in again[1]


# --- a rank that leaves --------------------------------------------------------------------------


def leave(how, leaver):
    comm = co.Communicator(heap_bytes=MIB, timeout=timedelta(seconds=30))
    x = comm.empty(1000).fill_(1)
    co.all_reduce_(x, group=comm)
    gather_objects(0)  # all ranks are through
    if comm.rank == leaver:
        if how == "closes":
            comm.close()
        elif how == "raises":
            with pytest.raises(ZeroDivisionError), comm:
                raise ZeroDivisionError
        elif how == "exits":
            os._exit(0)
        elif how == "forgets":
            del comm, x
        return None
    start = time.monotonic()
    error, message, _ = raised(lambda: co.all_reduce(x, group=comm))
    elapsed = time.monotonic() - start
    again = raised(comm.barrier)
    return error, message, elapsed, again, float(x.sum())


@pytest.mark.parametrize("how", ["closes", "raises", "exits", "forgets"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_that_leaves_is_lost_to_the_others(world_size, how):
    leaver = world_size - 1
    outcomes = run_fresh(world_size, leave, how, leaver)
    assert outcomes[leaver].exitcode == (0 if how == "exits" else None)
    for outcome in outcomes[:leaver]:
        assert outcome.ok, outcome.describe()
        error, message, elapsed, again, total = outcome.value
        assert error == "PeerLostError", (error, message)
        assert re.search(rf"\brank {leaver}\b", message), message
        assert elapsed < PROMPT
        assert again[0] == "PeerLostError" and message in again[1]
        assert total == 1000 * world_size


EXITING_PROGRAM = """
import sys
import torch, torch.distributed as dist
import coconet_ops as co
rank, world, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
co.all_reduce(torch.ones(3))
if rank == 1:
    %s
try:
    co.all_reduce(torch.ones(3))
except co.PeerLostError as error:
    assert "rank 1" in str(error), error
    sys.exit(42)
"""


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(0)", 0), ("raise ValueError('my own')", 1)], ids=["exit", "raise"]
)
def test_program_that_ends_is_lost_to_the_others(end, code):
    results = run_script(2, EXITING_PROGRAM % end)
    assert results[0][0] == 42, results[0][1]
    assert results[1][0] == code, results[1][1]
    assert ("my own" in results[1][1]) == (code == 1)


def lost_while_another_is_late(victim, late):
    """One rank computes for long; the others learn of the death all the same."""
    comm = co.Communicator(heap_bytes=MIB, timeout=timedelta(seconds=30))
    co.all_reduce(torch.ones(3), group=comm)
    gather_objects(0)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == late:
        time.sleep(3)
    start = time.monotonic()
    error, message, _ = raised(lambda: co.all_reduce(torch.ones(3), group=comm))
    return error, message, time.monotonic() - start


def test_death_is_noticed_while_waiting_for_another_rank():
    outcomes = run_fresh(3, lost_while_another_is_late, 2, 0, victims=[2])
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
        error, message, elapsed = outcome.value
        assert error == "PeerLostError" and re.search(r"\brank 2\b", message), (error, message)
        assert elapsed < 2, f"rank {outcome.rank} noticed after {elapsed:.1f} s"


def last_words(placement):
    """A rank that has done its part of the last op may leave: the op is complete."""
    for _ in range(20):
        comm = co.Communicator(heap_bytes=4 * MIB)
        x, _ = cases.placed(comm, torch.ones(70_000), placement)
        time.sleep(0.001 * comm.rank)
        y = co.all_reduce(x, group=comm)
        comm.close()
        assert (y == comm.world_size).all()
        gather_objects(0)


@pytest.mark.parametrize("placement", ["private", "heap"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_leaving_right_after_an_op_disturbs_nobody(pool, world_size, placement):
    pool.run(world_size, last_words, placement)


# --- Ctrl-C --------------------------------------------------------------------------------------


def interrupted(kind, placement):
    gather_objects(0)
    before = resources()
    comm = co.Communicator(heap_bytes=4 * MIB, timeout=timedelta(seconds=30))
    op = kind(comm, placement)
    op()
    gather_objects(0)
    if comm.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sent = []

        def interrupt():
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        timer = threading.Timer(0.3, interrupt)
        timer.start()
        error, message, _ = raised(op)
        elapsed = time.monotonic() - sent[0]
        timer.join()
    else:
        time.sleep(0.8)
        start = time.monotonic()
        error, message, _ = raised(op)
        elapsed = time.monotonic() - start
    again = raised(op)
    op.check_readable()
    comm.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    del op, comm
    return error, message, elapsed, again, leaked(before)


@pytest.mark.parametrize("placement", ["private", "heap"])
@pytest.mark.parametrize("kind", [AllReduce, Adam], ids=lambda kind: kind.name)
@pytest.mark.parametrize("world_size", [2, 3])
def test_interrupt_ends_a_wait_and_closes_the_communicator(world_size, kind, placement):
    results = values(run_fresh(world_size, interrupted, kind, placement))
    error, message, elapsed, again, leaks = results[0]
    assert error == "KeyboardInterrupt"
    assert elapsed < PROMPT
    assert again[0] == "CommunicatorError" and "interrupt" in again[1], again
    assert leaks == {}
    for error, message, elapsed, again, leaks in results[1:]:
        assert error == "PeerLostError", (error, message)
        assert "rank 0" in message and "interrupt" in message, message
        assert elapsed < PROMPT
        assert again[0] == "PeerLostError" and message in again[1]
        assert leaks == {}


class Stop(Exception):
    pass


def handler_raises():
    comm = co.Communicator(heap_bytes=MIB, timeout=timedelta(seconds=30))
    calls = []
    if comm.rank == 0:

        def handler(*arguments):
            calls.append(1)
            if len(calls) == 2:
                raise Stop

        signal.signal(signal.SIGUSR2, handler)
        for delay in (0.2, 0.5):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    else:
        gather_objects(0)
    error, message, _ = raised(comm.barrier)
    if comm.rank == 0:
        gather_objects(0)
    elif error == "nothing":  # rank 0 had come to this barrier, but not to the next
        error, message, _ = raised(comm.barrier)
    return error, message, len(calls)


def test_signal_handlers_run_during_a_wait_and_may_raise():
    results = values(run_fresh(2, handler_raises))
    assert results[0][0] == "Stop" and results[0][2] == 2
    assert results[1][0] == "PeerLostError"


# --- a rank that dies while they meet ------------------------------------------------------------


def fall_while_meeting(number):
    """The others have connected to this rank and wait for it when the signal hits it."""
    module = importlib.import_module("coconet_ops.communicator")
    exchange = module._exchange

    def exchange_and_fall(*arguments):
        exchange(*arguments)
        time.sleep(0.5)
        os.kill(os.getpid(), number)

    module._exchange = exchange_and_fall


def dies_while_meeting(victim):
    gather_objects(0)
    before = resources()
    if dist.get_rank() == victim:
        fall_while_meeting(signal.SIGKILL)
    start = time.monotonic()
    error, message, _ = raised(lambda: co.Communicator(heap_bytes=MIB))
    return error, message, time.monotonic() - start, leaked(before)


def test_death_while_ranks_meet_is_noticed_before_the_timeout():
    for outcome in run_fresh(3, dies_while_meeting, 1, victims=[1]):
        assert outcome.ok, outcome.describe()
        error, message, elapsed, leaks = outcome.value
        # The process group's own: it finds the dead rank when the others vote.
        assert error in ("RuntimeError", "CommunicatorError"), (error, message)
        assert elapsed < PROMPT
        assert leaks == {}


def interrupted_while_meeting(victim):
    gather_objects(0)
    before = resources()
    if dist.get_rank() == victim:
        fall_while_meeting(signal.SIGSTOP)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    error, message, _ = raised(lambda: co.Communicator(heap_bytes=MIB))
    elapsed = time.monotonic() - start
    timer.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return error, message, elapsed, leaked(before)


def test_interrupt_ends_the_wait_for_ranks_that_meet():
    (outcome,) = run_fresh(2, interrupted_while_meeting, 1, victims=[1])
    assert outcome.ok, outcome.describe()
    error, message, elapsed, leaks = outcome.value
    assert error == "KeyboardInterrupt", (error, message)
    assert elapsed < PROMPT
    assert leaks == {}


# --- a call that fails inside --------------------------------------------------------------------


def without_memory():
    comm = co.Communicator(heap_bytes=MIB, timeout=timedelta(seconds=30))
    x = torch.ones(16 * MIB)  # larger than what malloc keeps
    with no_more_memory() if comm.rank == 1 else contextlib.nullcontext():
        error, message, _ = raised(lambda: co.all_reduce(x, group=comm))
    return error, message, raised(comm.barrier)


def test_no_memory_for_a_result_is_told_to_the_others():
    for rank, (error, message, again) in enumerate(values(run_fresh(3, without_memory))):
        if rank == 1:
            assert error == "RuntimeError" and "memory" in message, (error, message)
            assert again[0] == "CommunicatorError" and message.splitlines()[0] in again[1], again
        else:
            assert error == "PeerLostError" and "rank 1" in message, (error, message)
            assert "failed inside the call" in message and "memory" in message, message
            assert again[0] == "PeerLostError" and message in again[1], again


# --- a rank that is late -------------------------------------------------------------------------


def late():
    comm = co.Communicator(heap_bytes=MIB, timeout=timedelta(seconds=1))
    x = comm.empty(10).fill_(1)
    gather_objects(0)
    if comm.rank == 1:
        time.sleep(2)
    error, message, _ = raised(lambda: co.all_reduce(x, group=comm))
    return error, message


def test_late_rank_learns_that_the_others_gave_up():
    results = values(run_fresh(2, late))
    error, message = results[0]
    assert error == "CommunicatorTimeout", (error, message)
    for part in ("all_reduce", "rank 0", "rank 1", "phase enter", "expected", "seen"):
        assert part in message, message
    error, message = results[1]
    assert error in ("CommunicatorTimeout", "PeerLostError"), (error, message)
    assert "rank 0" in message


def new_communicator_after_failure():
    comm = co.Communicator(heap_bytes=MIB, timeout=timedelta(seconds=0.5))
    if comm.rank == 1:
        time.sleep(1)
    with pytest.raises(co.CommunicatorTimeout):
        co.all_reduce(torch.ones(3), group=comm)
    dist.barrier()
    again = co.Communicator(heap_bytes=MIB)
    assert (co.all_reduce(torch.ones(5), group=again) == again.world_size).all()


def test_a_new_communicator_works_after_a_failure():
    values(run_fresh(2, new_communicator_after_failure))


def hold(seconds):
    """Waits longer than any spin or nap, several times, without a timeout."""
    comm = co.Communicator(heap_bytes=MIB, timeout=timedelta(seconds=30))
    for turn in range(4):
        if comm.rank == turn % comm.world_size:
            time.sleep(seconds)
        assert (co.all_reduce(torch.ones(5), group=comm) == comm.world_size).all()
    comm.close()


def test_long_waits_end_well(run_few):
    run_few(hold, 0.25)
