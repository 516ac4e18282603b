"""Communicators over a process's life: many of them, forked children, containers, small systems."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import gather_objects, raised, run_fresh, run_script, values

import coconet_ops as co
from coconet_ops.testing.resources import leaked, resources

MIB = 1 << 20


# --- many ----------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Of this process, without what it shares with others."""
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def create_use_and_close(number):
    comm = co.Communicator(heap_bytes=4 * MIB)
    x = comm.empty(100_000).fill_(1)
    assert (co.all_reduce(x, group=comm) == comm.world_size).all()
    assert (co.all_reduce(torch.ones(100_000), group=comm) == comm.world_size).all()
    optimizer = co.optim.DistributedFusedAdam(
        [torch.nn.Parameter(torch.ones(1000))], process_group=comm
    )
    optimizer.step()
    if number % 2:  # the others are forgotten
        comm.close()


def many(count):
    gather_objects(0)
    for number in range(20):  # whatever is created once
        create_use_and_close(number)
    before, resident = resources(), resident_bytes()
    for number in range(count):
        create_use_and_close(number)
    grown = resident_bytes() - resident
    gather_objects(0)
    return leaked(before), grown


def test_two_hundred_communicators_leave_nothing():
    for leaks, grown in values(run_fresh(2, many, 200)):
        assert leaks == {}
        # One of them takes 3 MiB.
        assert grown < 16 * MIB, f"{grown / MIB:.1f} MiB more than before"


# --- forked workers ------------------------------------------------------------------------------

START = """
import os, sys
import torch, torch.distributed as dist
import coconet_ops as co
from coconet_ops.testing.resources import leaked, resources
rank, world, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
"""

WORKERS = (
    START
    + """
comm = co.Communicator(heap_bytes=16 << 20, _liveness="%s")
table = comm.empty(1000).fill_(rank + 1)
x = comm.empty(1000)
optimizer = co.optim.DistributedFusedAdam([torch.nn.Parameter(torch.ones(300))], process_group=comm)

class Reading(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        for call in (comm.barrier, lambda: co.all_reduce(table, group=comm), optimizer.step):
            try:
                call()
            except co.CommunicatorError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError("a child has communicated")
        return table.sum().item() + i

def work():
    assert (co.all_reduce_(x.fill_(1), group=comm) == world).all()
    assert (co.all_reduce(torch.ones(50_000), group=comm) == world).all()
    optimizer.step()
    assert (table == rank + 1).all()

dist.barrier()
before = resources()
for epoch in range(3):
    count = 0
    for batch in torch.utils.data.DataLoader(Reading(), batch_size=4, num_workers=2):
        assert batch.tolist() == [1000 * (rank + 1) + 4 * count + i for i in range(4)], batch
        count += 1
        work()
        if epoch == 1 and count == 5:
            break  # the workers are stopped in the middle
    work()
del batch
more = leaked(before)
assert not more, more
comm.barrier()
"""
)


@pytest.mark.parametrize("liveness", ["auto", "heartbeat"])
def test_data_loader_workers_read_the_heap_while_the_parent_communicates(liveness):
    for code, stderr in run_script(2, WORKERS % liveness):
        assert code == 0, stderr


# --- containers ----------------------------------------------------------------------------------


def needs(*launcher):
    """Skips the test where such a command isn't allowed."""
    try:
        probe = subprocess.run([*launcher, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"there is no {launcher[0]} here")
    if probe.returncode != 0:
        pytest.skip(f"{' '.join(launcher)} isn't allowed here: {probe.stderr.strip()}")


PID_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")
ISOLATED = (
    START
    + """
assert os.getpid() == 1, "every rank is process 1 of its own namespace"
comm = co.Communicator(heap_bytes=4 << 20, _liveness="%s")
pidfds = sum(n for name, n in resources()["descriptors"].items() if "pidfd" in name)
assert pidfds == %d, resources()
x = comm.empty(1000).fill_(1)
for placed in (x, torch.ones(100_000)):
    assert (co.all_reduce(placed, group=comm) == world).all()
dist.barrier()
if rank == 1:
    os._exit(7)
try:
    co.all_reduce(x, group=comm)
except co.PeerLostError as error:
    assert "rank 1 died" in str(error), error
    os._exit(42)
"""
)


@pytest.mark.parametrize(("liveness", "pidfds"), [("auto", 2), ("heartbeat", 0)])
def test_ranks_in_pid_namespaces_of_their_own(liveness, pidfds):
    needs(*PID_NAMESPACE)
    results = run_script(3, ISOLATED % (liveness, pidfds), launcher=PID_NAMESPACE)
    assert [code for code, _ in results] == [42, 7, 42], results


# --- small systems -------------------------------------------------------------------------------


SMALL_SHM = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=4k shm /dev/shm && "$@"',
    "-",
)
CROWDED = (
    START
    + """
system = os.statvfs("/dev/shm")
assert system.f_blocks * system.f_frsize <= 4096
comm = co.Communicator(heap_bytes=64 << 20)
x = comm.empty(8 << 20).fill_(1)
assert (co.all_reduce(x, group=comm) == world).all()
assert (co.all_reduce(torch.ones(1 << 20), group=comm) == world).all()
assert os.listdir("/dev/shm") == []
"""
)


def test_small_dev_shm_is_no_limit():
    needs(*SMALL_SHM)
    for code, stderr in run_script(2, CROWDED, launcher=SMALL_SHM):
        assert code == 0, stderr


def out_of_descriptors():
    """Rank 0's limit leaves room for 0, 1, 2, ... more, until it is enough."""
    gather_objects(0)
    rank, limits = dist.get_rank(), resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resources()
    used = before["descriptors"].total() - 1  # without the one that counted
    refusals, created = [], False
    while not created:
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + len(refusals), limits[1]))
        name, message, _ = raised(lambda: co.Communicator(heap_bytes=MIB).close())
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        created = name == "nothing"
        if not created:
            refusals.append((name, message))
    return refusals, leaked(before)


def test_running_out_of_descriptors_is_named_on_all_ranks():
    for refusals, leaks in values(run_fresh(3, out_of_descriptors)):
        assert len(refusals) >= 8, "memfd, socket, pidfd, boot id, and three per peer"
        for name, message in refusals:
            assert name == "CommunicatorError", (name, message)
            assert "rank 0: " in message and "Too many open files" in message, message
        assert leaks == {}
