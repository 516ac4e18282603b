"""The backend "cuda_peer": ranks that are processes and launch one by one.

Here over the emulator, with buffers in shared memory in place of mapped device memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from datetime import timedelta

import cases
import pytest
import torch
import torch.distributed as dist
from harness import emulated_backend, raised, run_fresh, values

import coconet_ops as co
from coconet_ops.peer_memory import PeerMemory

MIB = 1 << 20


def shared_buffers(group, device, nbytes):
    """What symmetric memory gives, from files in memory."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    file = os.memfd_create("buffer")
    os.ftruncate(file, nbytes)
    paths = [None] * world_size
    dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{file}", group=group)
    maps = []
    for path in paths:
        with open(path, "r+b") as buffer:
            maps.append(mmap.mmap(buffer.fileno(), nbytes))
    dist.barrier(group)
    os.close(file)
    pointers = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in maps]
    return PeerMemory(
        device=0,
        rank=rank,
        world_size=world_size,
        nbytes=nbytes,
        pointers=pointers,
        _barrier=lambda: dist.barrier(group),
        _owner=maps,
    )


def connect(heap_bytes=4 * MIB, timeout=timedelta(seconds=40)):
    peers = {"backend": emulated_backend(), "allocate": shared_buffers}
    return co.Communicator(heap_bytes=heap_bytes, timeout=timeout, _peers=peers)


def calls():
    comm = connect()
    assert comm.backend == "cuda_peer" and not comm.closed
    world = comm.world_size
    digests = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for numel in (0, 1, 1023, 40_001):
            inputs = [cases.integers((numel,), dtype, rank, numel) for rank in range(world)]
            total = cases.reduced(inputs)
            for placement in ("private", "heap", "mixed"):
                x, _ = cases.placed(comm, inputs[comm.rank], placement)
                y = co.all_reduce(x, group=comm)
                cases.assert_exact(y, total, (dtype, numel, placement))
                slice_ = co.reduce_scatter(x, group=comm)
                cases.assert_exact(
                    slice_, total.tensor_split(world)[comm.rank], (dtype, numel, placement)
                )
                z = co.all_gather(slice_, size=numel, group=comm)
                cases.assert_exact(z, total, (dtype, numel, placement))
                digests.append(cases.digest(y))
    comm.barrier()
    return digests


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives(world_size):
    results = values(run_fresh(world_size, calls))
    assert all(result == results[0] for result in results)


def train():
    comm = connect()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.ReLU(), torch.nn.Linear(17, 5))
    twin = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.ReLU(), torch.nn.Linear(17, 5))
    twin.load_state_dict(model.state_dict())
    ours = co.optim.DistributedFusedAdam(model.parameters(), lr=1e-2, process_group=comm)
    stock = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
    data = torch.randn(comm.world_size, 8, 33)
    for _ in range(5):
        ours.zero_grad()
        model(data[comm.rank]).square().mean().backward()
        ours.step()
        stock.zero_grad()
        sum(twin(part).square().mean() for part in data).div(comm.world_size).backward()
        stock.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_an_optimizer_follows_torch():
    values(run_fresh(2, train))


def disagree():
    comm = connect()
    x = torch.full((5 + comm.rank,), 7.0)
    first = raised(lambda: co.all_reduce(x, group=comm))
    later = raised(comm.barrier)
    return first, later, comm.closed


def test_a_disagreement_is_raised_by_the_next_call_and_closes():
    for first, later, closed in values(run_fresh(2, disagree)):
        assert first[0] == "nothing"
        assert later[0] == "MismatchError" and closed
        assert "all_reduce: ranks disagree on shape: [5] on rank 0; [6] on rank 1" in later[1]


def bad_argument():
    comm = connect()
    x = torch.ones(4, dtype=torch.complex64 if comm.rank == 1 else torch.float32)
    return raised(lambda: co.all_reduce(x, group=comm)), raised(comm.barrier)


def test_bad_arguments_reach_the_peers():
    own, peer = values(run_fresh(2, bad_argument))[::-1]
    assert own[0][0] == "TypeError"
    assert peer[0][0] == "nothing" and peer[1][0] == "MismatchError"
    assert f"rank 1 was given bad arguments: {own[0][1]}" in peer[1][1]
    assert "complex64" in own[0][1]


def absent():
    comm = connect(timeout=timedelta(seconds=1.5))
    if comm.rank == 1:
        return None
    x = torch.ones(100_000)
    co.all_reduce(x, group=comm)  # its kernel gives up
    return raised(lambda: co.all_reduce(x, group=comm)), comm.closed


def test_a_rank_that_never_comes_is_a_timeout_with_a_cause():
    (error, text, _), closed = values(run_fresh(2, absent))[0]
    assert error == "CommunicatorTimeout" and closed
    for part in ("all_reduce on rank 0", "waited 1.5 s for rank 1", "phase enter", "seen 0"):
        assert part in text, text


def outlives():
    comm = connect()
    x = comm.empty(1000)
    x.fill_(3.0)
    comm.close()
    del comm
    return float(x.sum())


def test_tensors_outlive_the_communicator():
    assert values(run_fresh(2, outlives)) == [3000.0, 3000.0]


def without_a_device(device, heap_bytes):
    return raised(lambda: co.Communicator(device=device, heap_bytes=heap_bytes))[:2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_without_a_device_every_rank_gets_the_same_error(device):
    first, second = values(run_fresh(2, without_a_device, device, None))
    assert first == second and first[0] == "CommunicatorError"
    assert "rank 0: " in first[1] and "CUDA" in first[1]


def test_no_heap_is_an_error():
    for error, text in values(run_fresh(2, without_a_device, "cuda:0", 0)):
        assert error == "CommunicatorError"
        assert "rank 1: heap_bytes is 0; it must be positive" in text


def different_devices():
    device = "cpu" if dist.get_rank() else "cuda:0"
    return raised(lambda: co.Communicator(device=device))[:2]


def test_ranks_on_different_devices():
    for error, text in values(run_fresh(2, different_devices)):
        assert error == "CommunicatorError"
        assert "ranks disagree on device: ['cuda', 'cpu']" in text


class FailsOnRank1:
    """The emulator's backend, but its communicator can't be made on one rank."""

    def __getattr__(self, name):
        return getattr(emulated_backend(), name)

    def peer_communicator(self, rank, **options):
        if rank == 1:
            raise RuntimeError("no host memory")
        return emulated_backend().peer_communicator(rank=rank, **options)


def one_fails_at_the_end():
    peers = {"backend": FailsOnRank1(), "allocate": shared_buffers}
    return raised(lambda: co.Communicator(heap_bytes=4 * MIB, _peers=peers))[:2]


def test_a_rank_that_fails_at_the_end_fails_all():
    for error, text in values(run_fresh(2, one_fails_at_the_end)):
        assert error == "CommunicatorError"
        assert "could not be created: rank 1: no host memory" in text
