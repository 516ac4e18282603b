"""Communicator: identity, the symmetric heap, groups, lifetime."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import time
from datetime import timedelta

import cases
import pytest
import torch
import torch.distributed as dist
from harness import (
    assert_same_on_all_ranks,
    communicator,
    gather_objects,
    raised,
    run_fresh,
    run_script,
    values,
)

import coconet_ops as co
from coconet_ops.testing.resources import leaked, resources

MIB = 1 << 20


# --- identity ------------------------------------------------------------------------------------


def attributes():
    comm = co.Communicator(heap_bytes=4 * MIB, timeout=timedelta(seconds=7))
    assert comm.rank == dist.get_rank()
    assert comm.world_size == dist.get_world_size()
    assert comm.backend == "shm"
    assert comm.timeout == timedelta(seconds=7)
    assert comm.heap_bytes >= 4 * MIB
    assert comm.heap_allocated == 0
    assert comm.closed is False
    comm.close()
    assert comm.closed is True
    comm.close()


def test_attributes(run):
    run(attributes)


def endless_timeout():
    with co.Communicator(heap_bytes=MIB, timeout=timedelta.max) as comm:
        time.sleep(0.3 * comm.rank)
        comm.barrier()
        assert (co.all_reduce(torch.ones(3), group=comm) == comm.world_size).all()


def test_timeout_may_be_as_long_as_a_timedelta_can_be(run_pair):
    run_pair(endless_timeout)


def context_manager():
    with co.Communicator(heap_bytes=MIB) as comm:
        assert torch.equal(
            co.all_reduce(torch.ones(3), group=comm), torch.full((3,), float(comm.world_size))
        )
    assert comm.closed
    name, message, bases = raised(lambda: co.all_reduce(torch.ones(3), group=comm))
    assert name == "CommunicatorError" and "close" in message, (name, message)


def test_leaving_the_context_closes(run_few):
    run_few(context_manager)


def cached():
    group = dist.new_group(list(range(dist.get_world_size())))
    assert co.communicator() is co.communicator()
    assert co.communicator() is co.communicator(dist.group.WORLD)
    assert co.communicator(group) is co.communicator(group)
    assert co.communicator(group) is not co.communicator()
    # A closed one stays: it repeats why, instead of meeting peers that may be gone.
    first = co.communicator(group)
    first.close()
    assert co.communicator(group) is first
    assert raised(lambda: co.all_reduce(torch.ones(3), group=group))[0] == "CommunicatorError"
    with co.Communicator(group, heap_bytes=MIB) as second:
        second.barrier()
    dist.destroy_process_group(group)


def test_communicators_are_cached_per_group(run_pair):
    run_pair(cached)


def barrier_waits_for_all():
    comm = communicator()
    for _ in range(5):
        time.sleep(0.01 * comm.rank)
        arrived = time.monotonic()
        comm.barrier()
        left = time.monotonic()
        assert left >= max(gather_objects(arrived))


def test_barrier(run):
    run(barrier_waits_for_all)


# --- the heap ------------------------------------------------------------------------------------


def empty_arguments():
    comm = communicator()
    for x in (comm.empty(3, 4), comm.empty((3, 4)), comm.empty(torch.Size([3, 4]))):
        assert x.shape == (3, 4) and x.dtype == torch.get_default_dtype()
        assert x.is_contiguous() and not x.requires_grad and x.device.type == "cpu"
    assert comm.empty(()).shape == ()
    assert comm.empty(0, 5).shape == (0, 5)
    assert comm.empty(2, device="cpu").shape == (2,)
    dtypes = (torch.float64, torch.int8, torch.bool, torch.complex128, torch.bfloat16)
    for dtype in dtypes:
        x = comm.empty(5, dtype=dtype)
        assert x.dtype == dtype
        x.fill_(1)
        assert x.sum() == 5


def test_empty_takes_the_arguments_of_torch_empty(run_few):
    run_few(empty_arguments)


def ownership():
    comm = communicator()
    x = comm.empty(10, 10)
    assert comm.owns(x) and comm.owns(x[3:]) and comm.owns(x.t()) and comm.owns(x.view(-1)[99:])
    assert comm.owns(torch.nn.Parameter(x)) and comm.owns(x.detach())
    assert not comm.owns(torch.empty(10, 10)) and not comm.owns(x.clone())
    with co.Communicator(heap_bytes=MIB) as other:
        assert not other.owns(x)
        assert not comm.owns(other.empty(3))


def test_owns_tells_heap_from_private_memory(run_few):
    run_few(ownership)


def storages():
    comm = communicator()
    tensors = [comm.empty(size) for size in (10, 1, 1000, 0, 10)]
    for x in tensors:
        assert x.untyped_storage().nbytes() == x.nbytes
        assert x.storage_offset() == 0
    saved = io.BytesIO()
    torch.save(torch.nn.Parameter(tensors[0].fill_(3)), saved)
    assert len(saved.getvalue()) < 3000
    saved.seek(0)
    loaded = torch.load(saved)
    assert torch.equal(loaded, torch.full((10,), 3.0)) and not comm.owns(loaded)


def test_each_heap_tensor_has_its_own_storage_and_is_saved_alone(run_pair):
    run_pair(storages)


def no_overlap():
    comm = communicator()
    tensors = [comm.empty(size) for size in range(1, 200)]
    for number, x in enumerate(tensors):
        x.fill_(number)
    comm.barrier()
    for number, x in enumerate(tensors):
        co.all_reduce_(x, op="avg", group=comm)
        assert (x == number).all()
    for number, x in enumerate(tensors):
        assert (x == number).all()
        assert x.data_ptr() % 64 == 0


def test_tensors_do_not_overlap(run):
    run(no_overlap)


def accounting():
    with co.Communicator(heap_bytes=8 * MIB) as comm:
        x = comm.empty(MIB, dtype=torch.uint8)
        y = comm.empty(2 * MIB, dtype=torch.uint8)
        assert 3 * MIB <= comm.heap_allocated < 3 * MIB + 65536
        del x
        z = comm.empty(1)
        assert 2 * MIB <= comm.heap_allocated < 2 * MIB + 65536
        del y, z
        comm.empty(1)
        assert comm.heap_allocated < 65536


def test_heap_allocated_counts_live_blocks(run_few):
    run_few(accounting)


def freed_on_one_rank():
    with co.Communicator(heap_bytes=8 * MIB) as comm:
        first = comm.empty(MIB // 4).fill_(7)
        kept = None if comm.rank == 0 else first
        del first
        # Every rank writes the results of these into every rank's memory.
        others = [comm.empty(MIB // 4).fill_(comm.rank) for _ in range(3)]
        for x in others:
            co.all_reduce_(x, group=comm)
        assert kept is None or (kept == 7).all()
        before = comm.heap_allocated
        del kept, others, x
        comm.empty(1)
        assert comm.heap_allocated < before - 3 * MIB
        for _ in range(100):  # would need 200 MiB without reuse
            comm.empty(MIB // 2).fill_(1)


def test_memory_is_reused_only_after_all_ranks_have_freed_it(run_few):
    run_few(freed_on_one_rank)


def fragments():
    """Allocates and frees in an order that differs between the ranks."""
    with co.Communicator(heap_bytes=8 * MIB) as comm:
        live = {}
        generator = torch.Generator().manual_seed(0)
        for step in range(300):
            size = int(torch.randint(1, 20_000, (), generator=generator))
            live[step] = comm.empty(size).fill_(step)
            drop = [key for key in live if (key * 7 + comm.rank * 3) % 11 == step % 11]
            drop += [key for key in live if key < step - 40]
            for key in drop:
                if key in live:
                    del live[key]
            for key, x in live.items():
                assert (x[0] == key) and (x[-1] == key), (step, key)
        live.clear()
        comm.barrier()
        whole = comm.empty(7 * MIB, dtype=torch.uint8)
        assert whole.numel() == 7 * MIB


def test_freed_blocks_join_again(run_few):
    run_few(fragments)


def allocations_around_rejected_calls():
    """A rejected call waits for nobody, so its rank runs ahead of peers that still allocate."""
    with co.Communicator(heap_bytes=8 * MIB) as comm:
        live = []
        for step in range(400):
            bad = comm.rank == step % comm.world_size
            live.append(comm.empty(100 + step % 7).fill_(step))
            with pytest.raises(TypeError if bad else co.MismatchError):
                dtype = torch.int16 if bad else torch.float32
                co.all_reduce(torch.ones(3, dtype=dtype), group=comm)
            live.append(comm.empty(50).fill_(step))
            if (step + comm.rank) % 3 == 0:
                del live[::2]
            del live[:-10]
        offsets = [comm.empty(10).fill_(comm.rank) for _ in range(5)]
        for x in offsets:
            # Had the ranks reclaimed different blocks, this would write elsewhere.
            co.all_reduce_(x, group=comm)
            assert (x == comm.world_size * (comm.world_size - 1) / 2).all()
        assert_same_on_all_ranks(gather_objects(comm.heap_allocated))


def test_ranks_agree_on_the_heap_after_rejected_calls(run):
    run(allocations_around_rejected_calls)


def exhausted():
    with co.Communicator(heap_bytes=2 * MIB) as comm:
        x = comm.empty(MIB // 4).fill_(comm.rank)
        name, message, _ = raised(lambda: comm.empty(16 * MIB, dtype=torch.uint8))
        assert "heap" in message and "MiB" in message and "heap_bytes" in message, (name, message)
        assert name != "CommunicatorError"
        y = comm.empty(1000).fill_(1)
        co.all_reduce_(y, group=comm)
        assert (y == comm.world_size).all() and (x == comm.rank).all()
        return name, message


def test_exhausted_heap_is_an_error_on_every_rank_and_leaves_the_rest_usable(run_few):
    assert_same_on_all_ranks(run_few(exhausted))


def full_result():
    """The output of an op finds no room in the heap: the op still works, or says so."""
    with co.Communicator(heap_bytes=4 * MIB) as comm:
        x = comm.empty(3 * MIB // 4).fill_(1)
        try:
            y = co.all_reduce(x, group=comm)
        except Exception as error:
            assert "heap" in str(error), error
        else:
            assert (y == comm.world_size).all()
        assert (x == 1).all()
        co.all_reduce_(x, group=comm)
        assert (x == comm.world_size).all()


def test_result_that_finds_no_room_in_the_heap(run_few):
    run_few(full_result)


# --- lifetime ------------------------------------------------------------------------------------


def create_and_close():
    gather_objects(0)
    with co.Communicator(heap_bytes=MIB) as comm:  # whatever is created once
        comm.barrier()
    before = resources()
    for _ in range(20):
        with co.Communicator(heap_bytes=4 * MIB) as comm:
            x = comm.empty(1000).fill_(1)
            co.all_reduce_(x, group=comm)
            co.all_reduce(torch.ones(1000), group=comm)
            del x
    del comm
    assert leaked(before) == {}


def test_closed_communicators_leave_no_descriptor_mapping_or_thread(run_few):
    run_few(create_and_close)


def dropped_without_close():
    gather_objects(0)
    before = resources()
    for _ in range(5):
        comm = co.Communicator(heap_bytes=4 * MIB)
        x = comm.empty(1000).fill_(1)
        co.all_reduce_(x, group=comm)
        comm.barrier()
        del x, comm
        gc.collect()
    assert leaked(before) == {}


def test_forgotten_communicators_leave_nothing_either(run_few):
    run_few(dropped_without_close)


def tensors_survive():
    gather_objects(0)
    before = resources()
    comm = co.Communicator(heap_bytes=4 * MIB)
    x = comm.empty(1000).fill_(comm.rank)
    comm.close()
    gather_objects(0)
    assert (x == comm.rank).all()
    x.add_(1)
    assert x.sum() == 1000 * (comm.rank + 1)
    gc.collect()
    held = resources()["mappings"] - before["mappings"]
    assert sum(held.values()) == 1, f"more than the own heap is held: {held}"
    copied = copy.deepcopy(x)
    del x, comm
    assert leaked(before) == {}
    assert copied.sum() == 1000 * (copied[0].item())


def test_tensors_outlive_their_communicator(run_few):
    run_few(tensors_survive)


def after_destroy():
    comm = co.communicator()
    x = comm.empty(100).fill_(5)
    own = co.Communicator(heap_bytes=MIB)
    y = own.empty(100).fill_(6)
    dist.destroy_process_group()
    assert x.sum() == 500 and y.sum() == 600
    del comm, own
    gc.collect()
    assert x.sum() == 500 and y.sum() == 600
    return copy.deepcopy(x).sum().item()


def test_tensors_outlive_the_process_group():
    assert values(run_fresh(2, after_destroy)) == [500, 500]


def init_again(folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    first = co.communicator()
    assert torch.equal(co.all_reduce(torch.ones(3)), torch.full((3,), float(world)))
    for attempt in range(3):
        # The last one as by a program that imported the function before coconet_ops.
        destroy = dist.distributed_c10d.destroy_process_group
        (dist.destroy_process_group if attempt < 2 else destroy)()
        # The ranks change places.
        new_rank = (rank + attempt + 1) % world
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{attempt}", rank=new_rank, world_size=world
        )
        again = co.communicator()
        assert again is not first and again.rank == new_rank and not again.closed
        gathered = co.all_gather(torch.tensor([rank]))
        expected = [(r - attempt - 1) % world for r in range(world)]
        assert gathered.tolist() == expected
        first = again


def test_new_default_group_gets_a_new_communicator(tmp_path):
    for world_size in (2, 3):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        values(run_fresh(world_size, init_again, str(folder)))


PROGRAM = """
import sys
import torch, torch.distributed as dist
import coconet_ops as co
rank, world, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
x = co.communicator().empty(10).fill_(1)
torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
optimizer = co.optim.DistributedFusedAdam(model.parameters())
assert torch.equal(co.all_reduce(x), torch.full((10,), float(world)))
model(torch.ones(3)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    "ending",
    ["", "dist.destroy_process_group()"],
    ids=["just ends", "destroys the group"],
)
def test_program_ends_cleanly(ending):
    for code, stderr in run_script(2, PROGRAM + ending):
        assert code == 0, stderr
        assert "Error" not in stderr and "Traceback" not in stderr, stderr


# --- groups --------------------------------------------------------------------------------------


def subgroup(members):
    group = dist.new_group(members)
    rank = dist.get_rank()
    if rank not in members:
        return None
    comm = co.Communicator(group, heap_bytes=4 * MIB)
    assert comm.rank == dist.get_rank(group) and comm.world_size == len(members)
    for x in (torch.tensor([float(rank)]), comm.empty(1).fill_(rank)):
        for target in (comm, group):
            assert co.all_reduce(x, group=target).item() == sum(members)
            order = [dist.get_global_rank(group, r) for r in range(len(members))]
            assert co.all_gather(x, group=target).tolist() == order
    parts = torch.arange(7.0)
    y = co.reduce_scatter(parts, group=comm)
    assert torch.equal(y, (parts * len(members)).tensor_split(len(members))[comm.rank])
    params = [torch.ones(100)]
    state = co.AdamState(params, group=comm)
    co.rs_adam_ag_(params, [torch.full((100,), float(rank))], state, lr=0.1)
    # The first step is lr times the sign of the gradient.
    expected = torch.full((100,), 0.9 if sum(members) else 1.0)
    cases.assert_close(params[0], expected, cases.OPTIMIZER_TOLERANCE, "parameter")
    comm.close()
    return cases.digest(params[0])


@pytest.mark.parametrize("members", [[1, 3], [3, 1], [0, 2, 4], [4], [4, 0, 2, 1]], ids=str)
def test_subgroup_ranks_differ_from_global_ranks(members):
    digests = [d for d in values(run_fresh(5, subgroup, members)) if d is not None]
    assert len(digests) == len(members)
    assert_same_on_all_ranks(digests)


def disjoint_subgroups():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3, 4])]
    mine = groups[0] if rank < 2 else groups[1]
    members = [0, 1] if rank < 2 else [2, 3, 4]
    for step in range(50):
        assert co.all_reduce(torch.tensor([rank + step * 1.0]), group=mine).item() == sum(
            member + step for member in members
        )
    total = co.all_reduce(torch.tensor([float(rank)]))
    assert total.item() == 10


def test_disjoint_groups_work_side_by_side():
    values(run_fresh(5, disjoint_subgroups))


def interleaved():
    first = co.Communicator(heap_bytes=4 * MIB)
    second = co.Communicator(heap_bytes=4 * MIB)
    x, y = first.empty(1000), second.empty(1000)
    world = first.world_size
    for step in range(100):
        x.fill_(step)
        y.fill_(-step)
        if step % 2:
            co.all_reduce_(x, group=first)
            co.all_reduce_(y, group=second)
        else:
            co.all_reduce_(y, group=second)
            co.all_reduce_(x, group=first)
        assert (x == step * world).all() and (y == -step * world).all()
        # A tensor of one heap is private memory to the other communicator.
        assert (co.all_reduce(x, group=second) == step * world * world).all()
    first.close()
    assert (co.all_reduce(x, group=second) == 99 * world * world).all()
    second.close()


def test_two_communicators_over_the_same_ranks(run):
    run(interleaved)


def in_threads():
    comms = [co.Communicator(heap_bytes=4 * MIB) for _ in range(3)]
    failures = []

    def work(number, comm):
        try:
            x = comm.empty(5000)
            for step in range(60):
                own = float(step * (number + 1) + comm.rank)
                expected = step * (number + 1) + (comm.world_size - 1) / 2
                co.all_reduce_(x.fill_(own), op="avg", group=comm)
                assert (x == expected).all(), (number, step)
                y = co.all_reduce(torch.full((300,), own), op="avg", group=comm)
                assert (y == expected).all(), (number, step)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(comms)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    for comm in comms:
        comm.close()


def test_communicators_in_flight_in_several_threads(run_few):
    run_few(in_threads)


def counts_meanwhile(kind):
    comm = communicator()
    params = [torch.ones(100)]
    state = co.AdamState(params, group=comm)
    call = {
        "barrier": comm.barrier,
        "all_reduce": lambda: co.all_reduce(torch.ones(100), group=comm),
        "all_gather": lambda: co.all_gather(torch.ones(100), group=comm),
        "reduce_scatter": lambda: co.reduce_scatter(torch.ones(100), group=comm),
        "rs_adam_ag_": lambda: co.rs_adam_ag_(params, params, state, lr=0.1),
        "empty": lambda: comm.empty(100),
    }[kind]
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.4)
        call()
        return
    count = 0
    done = threading.Event()

    def work():
        nonlocal count
        while not done.is_set():
            count += 1
            time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    call()
    done.set()
    thread.join()
    assert count > 20, f"the other thread ran {count} times in 0.4 s"


@pytest.mark.parametrize(
    "kind", ["barrier", "all_reduce", "all_gather", "reduce_scatter", "rs_adam_ag_", "empty"]
)
def test_other_threads_run_while_a_rank_waits(run_pair, kind):
    run_pair(counts_meanwhile, kind)


def one_communicator_in_threads():
    """Threads of a rank share a communicator: calls of one thread wait for those of another. The
    order must be the same on all ranks, so only one rank has two threads."""
    comm = co.Communicator(heap_bytes=4 * MIB)
    if comm.rank == 0:
        threads = [
            threading.Thread(
                target=lambda: [co.all_reduce(torch.ones(2000), group=comm) for _ in range(50)]
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for _ in range(100):
            total = co.all_reduce(torch.ones(2000), group=comm)
            assert (total == comm.world_size).all()
    comm.close()


def test_threads_may_share_a_communicator(run_few):
    run_few(one_communicator_in_threads)


# --- hosts ---------------------------------------------------------------------------------------


def another_host(odd):
    if dist.get_rank() == odd:
        co._C.host_identity = lambda: "another boot and network"
    name, message, _ = raised(lambda: co.Communicator(heap_bytes=MIB))
    return name, message


def test_ranks_on_several_hosts_are_told_which():
    for name, message in values(run_fresh(3, another_host, 1)):
        assert name == "CommunicatorError" and "host" in message, (name, message)
        assert "another boot and network" in message, message
        assert "ranks [0, 2]" in message and "ranks [1]" in message, message


# --- counters ------------------------------------------------------------------------------------


def around_the_wrap():
    """The 32-bit counters pass 2^32 on the way."""
    comm = co.Communicator(heap_bytes=8 * MIB, _first_epoch=2**32 - 20)
    world = comm.world_size
    private, heap = torch.ones(300_000), comm.empty(300_000).fill_(1)
    params = [torch.ones(1000)]
    state = co.AdamState(params, group=comm)
    for step in range(15):
        for x in (private, heap):
            assert (co.all_reduce(x, group=comm) == world).all()
            assert (co.reduce_scatter(x, group=comm) == world).all()
            assert (co.all_gather(x[:999], group=comm) == 1).all()
        co.rs_adam_ag_(params, [torch.ones(1000)], state, lr=0.0625)
        comm.barrier()
        assert comm.empty(100 + step).numel() == 100 + step
        with pytest.raises((TypeError, co.MismatchError)):
            dtype = torch.int16 if comm.rank == 0 else torch.float32
            co.all_reduce(torch.ones(3, dtype=dtype), group=comm)
    cases.assert_close(
        params[0], torch.full((1000,), 1 - 15 / 16), cases.OPTIMIZER_TOLERANCE, "parameter"
    )
    comm.close()


def test_counters_may_wrap(run_few):
    run_few(around_the_wrap)


# --- fork ----------------------------------------------------------------------------------------


def fork_child():
    comm = co.Communicator(heap_bytes=4 * MIB)
    x = comm.empty(1000).fill_(comm.rank + 1)
    co.all_reduce_(x, op="avg", group=comm)
    expected = x.sum().item()
    comm.barrier()
    for ending in ("_exit", "close", "collect"):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                assert x.sum().item() == expected
                for call in (
                    lambda: co.all_reduce(x, group=comm),
                    lambda: co.all_reduce(torch.ones(3), group=comm),
                    lambda: comm.empty(3),
                    comm.barrier,
                ):
                    name, message, bases = raised(call)
                    assert "CommunicatorError" in bases and "fork" in message, (name, message)
                status = 2
                if ending == "close":
                    comm.close()
                    assert x.sum().item() == expected
                elif ending == "collect":
                    del comm, x, call
                    gc.collect()
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, ending
        co.all_reduce_(x, op="avg", group=comm)
        assert x.sum().item() == expected, f"the child's {ending} disturbed the parent"
        assert (co.all_reduce(torch.ones(7), group=comm) == comm.world_size).all()
    comm.close()


def test_forked_child_reads_the_heap_but_may_not_communicate():
    values(run_fresh(2, fork_child))


FORKING_PROGRAM = (
    PROGRAM
    + """
import multiprocessing
def child():
    assert x.sum().item() == 10
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
assert process.exitcode == 0
loader = torch.utils.data.DataLoader(range(8), num_workers=1)
assert len(list(loader)) == 8
import atexit, os
pid = os.fork()
if pid == 0:
    # All that sys.exit() does but for the destructor of torch's group, which waits for its threads.
    atexit._run_exitfuncs()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert torch.equal(co.all_reduce(x), torch.full((10,), float(world)))
"""
)


def test_forked_children_that_exit_normally_do_not_disturb_the_parent():
    for code, stderr in run_script(2, FORKING_PROGRAM):
        assert code == 0, stderr


def as_many_tensors_as_there_may_be():
    with co.Communicator(heap_bytes=32 << 20, timeout=timedelta(seconds=40)) as comm:
        tensors = [comm.empty(1) for _ in range(65536)]
        with pytest.raises(MemoryError, match="65536 live tensors"):
            comm.empty(1)
        del tensors[::2]
        comm.barrier()
        assert comm.empty(1).numel() == 1


def test_the_number_of_tensors_in_the_heap_has_a_limit_that_is_named():
    values(run_fresh(2, as_many_tensors_as_there_may_be))
