"""LocalCommunicator: ranks that are threads of one process."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from datetime import timedelta

import cases
import pytest
import torch
import torch.distributed as dist
from harness import communicator, emulated_backend, missing_backends, run_fresh, run_script, values

import coconet_ops as co
from coconet_ops.testing.resources import leaked, resources

MIB = 1 << 20


@pytest.fixture(params=[1, 2, 3, 8], ids="world{}".format)
def local(request):
    with co.LocalCommunicator(request.param, heap_bytes=4 * MIB) as local:
        yield local


@pytest.fixture
def three():
    with co.LocalCommunicator(3, heap_bytes=4 * MIB) as local:
        yield local


def test_ranks_are_communicators(local):
    assert local.world_size == len(local.ranks) and local.device == torch.device("cpu")
    for rank, comm in enumerate(local.ranks):
        assert isinstance(comm, co.Communicator) and co.communicator(comm) is comm
        assert (comm.rank, comm.world_size) == (rank, local.world_size)
        assert comm.backend == "local" and comm.device == local.device
        assert comm.heap_bytes == 4 * MIB and comm.timeout == timedelta(seconds=60)
    assert "open" in repr(local) and "local" in repr(local.ranks[0])


def test_results_are_by_rank(local):
    def work(comm, factor, *more):
        assert more == ("a", None)
        total = co.all_reduce(torch.full((5,), float(comm.rank)), group=comm)
        return comm.rank * factor, total

    world = local.world_size
    for factor in (2, 3):
        for rank, (number, total) in enumerate(local.run(work, factor, "a", None)):
            assert number == rank * factor
            assert torch.equal(total, torch.full((5,), world * (world - 1) / 2))


def test_every_rank_has_a_thread_of_its_own(local):
    def work(comm):
        comm.barrier()  # all of them live now
        return threading.get_ident(), threading.current_thread().name

    threads = local.run(work)
    assert len({ident for ident, _ in threads}) == local.world_size
    assert [name for _, name in threads] == [f"rank {r}" for r in range(local.world_size)]
    assert threading.get_ident() not in {ident for ident, _ in threads}


def test_all_ops(local):
    world = local.world_size

    def work(comm):
        x = comm.empty(12).fill_(comm.rank)
        x = co.all_reduce_(x, group=comm)
        shard = co.reduce_scatter(x, group=comm)
        assert comm.owns(shard) and not comm.owns(torch.ones(3))
        gathered = co.all_gather(shard, group=comm)
        p = torch.nn.Parameter(torch.ones(1000))
        optimizer = co.optim.DistributedFusedAdam([p], lr=0.25, process_group=comm)
        co.copy_to_group(p, group=comm).sum().backward()
        assert (p.grad == world).all()
        optimizer.step()
        comm.barrier()
        return gathered.tolist(), p.detach()

    for gathered, p in local.run(work):
        assert gathered == [world * world * (world - 1) / 2] * 12
        cases.assert_close(p, torch.full((1000,), 0.75), {"rtol": 0, "atol": 1e-6}, "weights")


def test_sixty_four_ranks():
    with co.LocalCommunicator(64, heap_bytes=MIB) as local:
        for x in local.run(lambda comm: co.all_reduce(torch.ones(1000), group=comm)):
            assert (x == 64).all()


def test_counters_wrap_around():
    timeout = timedelta(seconds=0.5)
    with co.LocalCommunicator(2, heap_bytes=MIB, timeout=timeout, _first_epoch=2**32 - 5) as local:

        def work(comm):
            for _ in range(4):
                assert (co.all_reduce(torch.ones(3), group=comm) == 2).all()
            if comm.rank == 0:
                with pytest.raises(co.CommunicatorTimeout, match="expected 0, seen 4294967295"):
                    comm.barrier()

        local.run(work)
    with co.LocalCommunicator(2, heap_bytes=MIB, _first_epoch=2**32 - 5) as local:

        def work(comm):
            for _ in range(20):
                assert (co.all_reduce(torch.ones(3), group=comm) == 2).all()

        local.run(work)


# --- autograd ------------------------------------------------------------------------------------


def test_backward_passes_stay_in_their_thread(three):
    """A hook that talks to the other ranks deadlocks unless it runs in its rank's thread."""

    def work(comm):
        where = []
        x = torch.ones(4, requires_grad=True)
        y = x * (comm.rank + 1)
        y.register_hook(lambda g: where.append(threading.get_ident()))
        y.register_hook(lambda g: co.all_reduce(g, group=comm))
        assert not torch.autograd.is_multithreading_enabled()
        y.sum().backward()
        assert where == [threading.get_ident()]
        assert (x.grad == 3 * (comm.rank + 1)).all()

    three.run(work)
    assert torch.autograd.is_multithreading_enabled()


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
def test_threads_have_the_modes_of_the_caller(three, mode):
    def modes(comm=None):
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with mode():
        assert three.run(modes) == [modes()] * 3


# --- failures ------------------------------------------------------------------------------------


def assert_closed(local):
    assert local.closed and all(comm.closed for comm in local.ranks)
    assert "closed" in repr(local)
    with pytest.raises(co.CommunicatorError, match="LocalCommunicator.run: .*closed"):
        local.run(lambda comm: None)


@pytest.mark.parametrize("error", [KeyError, SystemExit, StopIteration, GeneratorExit])
def test_a_rank_that_raises_ends_its_peers(three, error):
    ends = []

    def work(comm):
        co.all_reduce(torch.ones(3), group=comm)
        if comm.rank == 1:
            time.sleep(0.2)
            raise error("of rank 1")
        try:
            comm.barrier()
        except BaseException as lost:
            ends.append((type(lost), str(lost)))
            raise

    with pytest.raises(error, match="of rank 1") as caught:
        three.run(work)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised by rank 1 of a LocalCommunicator"]
    assert [kind for kind, _ in ends] == [co.PeerLostError] * 2
    assert all("rank 1" in text for _, text in ends), ends
    assert_closed(three)


def test_the_first_of_several_failures_is_raised(three):
    def work(comm):
        time.sleep((0.4, 0.0, 0.2)[comm.rank])
        raise ValueError(f"of rank {comm.rank}")

    with pytest.raises(ValueError, match="of rank 1"):
        three.run(work)


def test_bad_arguments_are_raised_rather_than_the_mismatch_they_cause(three):
    def work(comm):
        dtype = torch.int16 if comm.rank == 2 else torch.float32
        try:
            co.all_reduce(torch.ones(3, dtype=dtype), group=comm)
        except TypeError:
            time.sleep(0.3)  # the others fail first
            raise

    with pytest.raises(TypeError, match="int16"):
        three.run(work)


def test_all_ranks_are_closed_after_a_failure(three):
    def work(comm):
        if comm.rank == 1:
            raise KeyError("of rank 1")

    with pytest.raises(KeyError, match="of rank 1"):
        three.run(work)
    assert_closed(three)


def test_disagreement_that_is_caught_does_no_harm(three):
    def work(comm):
        with pytest.raises(co.MismatchError, match="shape"):
            co.all_reduce(torch.ones(3 + comm.rank), group=comm)
        return co.all_reduce(torch.ones(3), group=comm)

    for _ in range(3):
        assert all((x == 3).all() for x in three.run(work))


def test_a_rank_that_closes_is_lost_to_the_others(three):
    def work(comm):
        if comm.rank == 0:
            comm.close()
            return
        comm.barrier()

    with pytest.raises(co.PeerLostError, match="rank 0 closed"):
        three.run(work)
    assert_closed(three)


def test_two_ranks_in_one_thread_time_out():
    local = co.LocalCommunicator(2, heap_bytes=MIB, timeout=timedelta(seconds=0.3))
    with pytest.raises(co.CommunicatorTimeout, match="waited 0.3 s for rank 1"):
        local.ranks[0].barrier()
    with pytest.raises(co.CommunicatorTimeout):
        local.ranks[1].barrier()
    assert_closed(local)


def test_a_rank_that_does_not_call_makes_the_others_time_out():
    local = co.LocalCommunicator(3, heap_bytes=MIB, timeout=timedelta(seconds=0.3))

    def work(comm):
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(co.CommunicatorTimeout, match="for rank 1"):
        local.run(work)
    assert_closed(local)


def test_close_ends_calls_that_wait(three):
    """Rank 0 waits for rank 1, which makes no call, and can close only after it."""
    closed = threading.Event()

    def work(comm):
        if comm.rank == 1:
            closed.wait()
            return "alone"
        try:
            co.all_reduce(torch.ones(3), group=comm)
        except co.CommunicatorError as error:
            return type(error)

    results = []
    runs = threading.Thread(target=lambda: results.extend(three.run(work)))
    runs.start()
    time.sleep(0.5)  # so that ranks 0 and 2 wait
    start = time.monotonic()
    three.close()
    closed.set()
    runs.join()
    assert results == [co.PeerLostError, "alone", co.PeerLostError]
    assert time.monotonic() - start < 30, "it waited for the timeout"
    assert_closed(three)
    three.close()


def test_tensors_outlive_the_communicator(three):
    xs = three.run(lambda comm: comm.empty(1000).fill_(comm.rank))
    three.close()
    assert [x.sum().item() for x in xs] == [0, 1000, 2000]


def test_group_is_a_rank_and_not_all_of_them(three):
    with pytest.raises(TypeError, match="group is a LocalCommunicator"):
        co.all_reduce(torch.ones(3), group=three)


def test_one_run_at_a_time(three):
    def work(comm):
        with pytest.raises(RuntimeError, match="running already"):
            three.run(lambda comm: None)
        return comm.rank

    assert three.run(work) == [0, 1, 2]
    assert three.run(work) == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((0,), {}, ValueError, "world_size is 0; it must be between 1 and 64"),
        ((65,), {}, ValueError, "world_size is 65; it must be between 1 and 64"),
        ((2.0,), {}, TypeError, "world_size is 2.0; it must be an integer"),
        ((2,), {"device": "meta"}, ValueError, "device is meta"),
        ((2,), {"heap_bytes": -1}, ValueError, "heap_bytes is -1"),
        ((2,), {"heap_bytes": "big"}, TypeError, "heap_bytes is 'big'"),
        ((2,), {"timeout": 3}, TypeError, "timeout is 3"),
        ((2,), {"timeout": timedelta(0)}, ValueError, "timeout is 0:00:00"),
        ((2,), {"heap_bytes": 2**62}, co.CommunicatorError, "no shared memory"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, options, error, words):
    before = resources()
    with pytest.raises(error, match=f"LocalCommunicator: .*{words}"):
        co.LocalCommunicator(*arguments, **options)
    assert leaked(before) == {}


# --- several, and beside process groups ----------------------------------------------------------


def test_two_at_once():
    with (
        co.LocalCommunicator(3, heap_bytes=MIB) as outer,
        co.LocalCommunicator(3, heap_bytes=MIB) as other,
    ):

        def work(comm):
            twin = other.ranks[comm.rank]
            for _ in range(50):
                first = co.all_reduce(torch.ones(10), group=comm)
                second = co.all_reduce(first, group=twin)
            return second

        assert all((x == 9).all() for x in outer.run(work))
        assert all((x == 9).all() for x in outer.run(work))


@pytest.mark.parametrize("backend", ["local", "emulated"])
def test_threads_of_one_rank_take_turns(backend):
    if backend in missing_backends():
        pytest.skip(missing_backends()[backend])
    options = {"_backend": emulated_backend()} if backend == "emulated" else {}
    local = co.LocalCommunicator(2, heap_bytes=4 * MIB, timeout=timedelta(seconds=40), **options)
    totals = []

    def call(comm):
        totals.append(float(co.all_reduce(torch.full((5,), 2.0), group=comm)[0]))

    # Rank 0 calls from two threads before rank 1 does.
    early, late = (
        [threading.Thread(target=call, args=(comm,)) for _ in "ab"] for comm in local.ranks
    )
    for thread in early:
        thread.start()
    time.sleep(0.3)
    for thread in late:
        thread.start()
    for thread in early + late:
        thread.join()
    local.close()
    assert totals == [4.0] * 4


@pytest.fixture
def emulated():
    with co.LocalCommunicator(1, heap_bytes=4 * MIB, _backend=emulated_backend()) as local:
        yield local


def test_memory_behind_the_heap_is_not_owned(emulated):
    (comm,) = emulated.ranks
    first = emulated.run(lambda comm: comm.empty(16))[0]
    behind = (ctypes.c_char * 1).from_address(first.data_ptr() + comm.heap_bytes)
    assert comm.owns(first) and not comm.owns(torch.frombuffer(behind, dtype=torch.uint8))


def test_step_counts_are_one_for_each_tensor(emulated):
    params = [torch.zeros(5), torch.zeros(7)]
    state = emulated.run(lambda comm: co.AdamState(params, group=comm))[0]
    with pytest.raises(ValueError, match="there are 1 step counts for 2 tensors"):
        state._list.steps = [3]
    state._list.steps = [3, 4]
    assert state.steps == [3, 4]


def test_one_inside_another(three):
    def work(comm):
        with co.LocalCommunicator(2, heap_bytes=MIB) as inner:
            sums = inner.run(lambda own: co.all_reduce(torch.ones(4) * comm.rank, group=own))
        return co.all_reduce(sums[1], group=comm)

    assert all((x == 6).all() for x in three.run(work))


def beside_a_group():
    """A rank of a process group has ranks of its own."""
    comm = communicator()
    assert comm.backend == "shm" and comm.device == torch.device("cpu")
    local = co.LocalCommunicator(3, heap_bytes=4 * MIB)

    def work(own):
        return co.all_reduce(torch.full((100,), float(comm.rank + own.rank)), group=own)

    for _ in range(3):
        mine = local.run(work)[0]
        assert (mine == 3 * comm.rank + 3).all()
        total = co.all_reduce(mine, group=comm)
        assert (total == 3 + 6).all()
    # What belongs to the group is closed with it, and nothing else.
    dist.destroy_process_group()
    assert comm.closed and not local.closed
    assert (local.run(work)[2] == 3 * comm.rank + 3).all()
    local.close()


def test_beside_a_process_group():
    values(run_fresh(2, beside_a_group))


def test_many_leave_nothing():
    def use(number):
        local = co.LocalCommunicator(3, heap_bytes=MIB)

        def work(comm):
            if number % 3 == 2 and comm.rank == 1:
                raise KeyError
            x = comm.empty(1000).fill_(1)
            return co.all_reduce(x, group=comm)

        try:
            local.run(work)
        except KeyError:
            pass
        if number % 3 == 0:  # the others are forgotten, or closed by their failure
            local.close()

    for number in range(6):
        use(number)
    before, threads = resources(), threading.active_count()
    for number in range(60):
        use(number)
    assert leaked(before) == {}
    assert threading.active_count() == threads


# --- Ctrl-C --------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys, threading, time
import torch
import coconet_ops as co

local = co.LocalCommunicator(3, heap_bytes=1 << 20)
ends = []

def work(comm):
    try:
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        while True:
            {call}
    except co.CommunicatorError as error:
        ends.append(comm.rank)
        raise

before = threading.active_count()
start = time.monotonic()
try:
    local.run(work)
except KeyboardInterrupt:
    assert time.monotonic() - start < 30, "it waited for the timeout"
    assert sorted(ends) == [0, 1, 2], ends
    assert threading.active_count() == before, threading.enumerate()
    assert all(comm.closed for comm in local.ranks)
    sys.exit(42)
"""


@pytest.mark.parametrize(
    "call", ["comm.barrier()", "co.all_reduce(torch.ones(100_000), group=comm)"]
)
def test_ctrl_c_closes_the_ranks_and_ends_the_threads(call):
    [(code, stderr)] = run_script(1, INTERRUPTED.format(call=call))
    assert code == 42, stderr


def full_heap_on_rank_1(comm):
    x = comm.empty(100_000)
    x.fill_(1.0)
    kept = [co.all_reduce(x, group=comm) for _ in range(9)]  # in the heap, as long as it has room
    if comm.rank == 0:
        kept.clear()
    params = [torch.zeros(4) for _ in range(3000)]
    if comm.rank == 1:
        with pytest.raises(MemoryError, match="the heap of rank 1 has no room for the tables"):
            co.AdamState(params, group=comm)
        return None
    co.AdamState(params, group=comm)
    with pytest.raises(co.MismatchError, match="rank 1 was given bad arguments.*no room"):
        co.all_reduce(x, group=comm)
    return None


def test_a_heap_without_room_for_a_state_reaches_the_peers():
    with co.LocalCommunicator(2, heap_bytes=4 * MIB, _backend=emulated_backend()) as local:
        local.run(full_heap_on_rank_1)
