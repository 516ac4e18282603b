"""Peer memory from torch's symmetric memory and from NCCL, without a GPU: torch's module and its
handle are fakes, the votes between the ranks are real."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import assert_same_on_all_ranks

import coconet_ops as co
from coconet_ops import peer_memory
from coconet_ops.errors import CommunicatorError

MODULE = "torch.distributed._symmetric_memory"
NBYTES = 1000


class Handle:
    """What rendezvous gives; every rank's buffer but the own one is a made-up address."""

    def __init__(self, fake: Fake, tensor: torch.Tensor) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.buffer_size = tensor.numel()
        self.buffer_ptrs = [4096 * (1 + rank) for rank in range(self.world_size)]
        self.buffer_ptrs[self.rank] = tensor.data_ptr()

        def barrier(channel: int = 0, timeout_ms: int = 0) -> None:
            fake.log(f"barrier on {fake.contents()}")

        self.barrier = barrier


class Fake:
    """torch's module, its CUDA device and NCCL as one rank of the default group sees them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.device = SimpleNamespace(uuid=f"GPU-{dist.get_rank()}")
        self.available = True
        self.handle: Handle | None = None
        self.alter = lambda handle: None
        self.module = SimpleNamespace(
            rendezvous=self.rendezvous,
            _SymmetricMemory=SimpleNamespace(empty_strided_p2p=self.empty_strided_p2p),
        )

    def log(self, event: str) -> None:
        self.events.append(event)

    def contents(self) -> str:
        tensor = self.tensor()
        return "nothing" if tensor is None else f"{int(tensor.count_nonzero())} nonzero bytes"

    def empty_strided_p2p(self, size, stride, dtype, device):
        assert (size, stride, dtype) == ((NBYTES,), (1,), torch.uint8)
        assert device == torch.device("cuda", dist.get_rank())
        memory = torch.full((size[0] + 256,), 255, dtype=dtype)
        tensor = memory[-memory.data_ptr() % 256 :][: size[0]]
        self.tensor = weakref.ref(tensor)
        self.log("allocate")
        return tensor

    def rendezvous(self, tensor, group):
        assert group is dist.group.WORLD
        self.log("rendezvous")
        handle = Handle(self, tensor)
        self.alter(handle)
        self.handle = weakref.ref(handle)
        return handle

    def allocate(self, nbytes: int = NBYTES, device=None):
        device = dist.get_rank() if device is None else device
        with (
            mock.patch.dict(sys.modules, {MODULE: self.module}),
            mock.patch.multiple(
                torch.cuda,
                is_available=lambda: self.available,
                get_device_properties=lambda index: self.device,
                synchronize=lambda device: self.log(f"synchronize on {self.contents()}"),
            ),
        ):
            return peer_memory.allocate(None, device, nbytes)

    def failure(self, **arguments) -> tuple[str, str, list[str]]:
        """The message of the error, what caused it here, and what was called until then."""
        with pytest.raises(CommunicatorError) as info:
            self.allocate(**arguments)
        return str(info.value), repr(info.value.__cause__), self.events


def succeed() -> None:
    fake, rank, world = Fake(), dist.get_rank(), dist.get_world_size()
    memory = fake.allocate()
    assert (memory.device, memory.rank, memory.world_size) == (rank, rank, world)
    assert memory.nbytes == NBYTES
    expected = [4096 * (1 + peer) for peer in range(world)]
    expected[rank] = fake.tensor().data_ptr()
    assert memory.pointers == expected
    # Zeros must be in memory, on all ranks, before any of them comes to the barrier.
    zeroed = "synchronize on 0 nonzero bytes"
    started = ["allocate", "rendezvous", zeroed, "barrier on 0 nonzero bytes", zeroed]
    assert fake.events == started
    memory.barrier()
    assert fake.events == [*started, "barrier on 0 nonzero bytes"]

    gc.collect()
    assert fake.tensor() is not None and fake.handle() is not None
    del memory
    gc.collect()
    assert fake.tensor() is None and fake.handle() is None


def test_every_rank_gets_every_pointer(run):
    run(succeed)


def lack(where: str, attribute: str) -> tuple[str, str, list[str]]:
    fake = Fake()
    if dist.get_rank() == 1:
        if where == "module":
            delattr(fake.module, attribute)
        elif where == "class":
            delattr(fake.module._SymmetricMemory, attribute)
        else:
            fake.alter = lambda handle: delattr(handle, attribute)
    return fake.failure()


@pytest.mark.parametrize(
    "where, attribute",
    [
        ("module", "rendezvous"),
        ("module", "_SymmetricMemory"),
        ("class", "empty_strided_p2p"),
        ("handle", "rank"),
        ("handle", "world_size"),
        ("handle", "buffer_size"),
        ("handle", "buffer_ptrs"),
        ("handle", "barrier"),
    ],
)
def test_missing_attribute(run_pair, where, attribute):
    results = run_pair(lack, where, attribute)
    assert_same_on_all_ranks([message for message, *_ in results])
    message = results[0][0]
    assert f".{attribute}; versions known to have it: {peer_memory.KNOWN_TORCH}" in message
    assert f"rank 1: RuntimeError: torch {torch.__version__} has no " in message
    assert not any("barrier on" in event for _, _, events in results for event in events)


def lack_module() -> tuple[str, str, list[str]]:
    fake = Fake()
    if dist.get_rank() == 1:
        fake.module = None  # importing it raises ImportError
    return fake.failure()


def test_missing_module(run_pair):
    results = run_pair(lack_module)
    assert_same_on_all_ranks([message for message, *_ in results])
    assert f"has no {MODULE}; versions known" in results[0][0]
    assert [events for *_, events in results] == [[], []]


HANDLES = {
    "rank": (lambda h: setattr(h, "rank", 0), "the handle is rank 0 of 2, but the group says"),
    "world_size": (lambda h: setattr(h, "world_size", 3), "rank 1 of 3, but the group says rank 1"),
    "size": (lambda h: setattr(h, "buffer_size", 999), "buffer has 999 bytes of 1000 asked for"),
    "few": (lambda h: h.buffer_ptrs.pop(0), "has 1 buffers for 2 ranks"),
    "many": (lambda h: h.buffer_ptrs.append(256), "has 3 buffers for 2 ranks"),
    "own": (lambda h: h.buffer_ptrs.__setitem__(1, 256), "own buffer is at 0x100, but the tensor"),
    "null": (lambda h: h.buffer_ptrs.__setitem__(0, 0), "ranks [0] can't be reached by load"),
    "unaligned": (
        lambda h: h.buffer_ptrs.__setitem__(0, 384),
        "rank 0 is at 0x180, not a multiple of 256",
    ),
}


def hand_out(name: str) -> tuple[str, str, list[str]]:
    fake = Fake()
    if dist.get_rank() == 1:
        fake.alter = HANDLES[name][0]
    return fake.failure()


@pytest.mark.parametrize("name", HANDLES)
def test_wrong_handle(run_pair, name):
    results = run_pair(hand_out, name)
    assert_same_on_all_ranks([message for message, *_ in results])
    assert "rendezvous: rank 1: RuntimeError: " in results[0][0]
    assert HANDLES[name][1] in results[0][0]


def fail_at(step: str) -> tuple[str, str, list[str]]:
    fake = Fake()

    def fail(*arguments, **keywords):
        raise RuntimeError("CUDA driver error: no peer access")

    if dist.get_rank() == 1:
        if step == "allocating":
            fake.module._SymmetricMemory.empty_strided_p2p = fail
        elif step == "rendezvous":
            fake.module.rendezvous = fail
        else:
            fake.alter = lambda handle: setattr(handle, "barrier", fail)
    return fake.failure()


@pytest.mark.parametrize("step", ["allocating", "rendezvous", "first barrier"])
def test_torch_fails_on_one_rank(run_pair, step):
    (message, cause, events), (message1, cause1, _) = run_pair(fail_at, step)
    assert message == message1
    assert f"{step}" in message
    assert message.endswith(": rank 1: RuntimeError: CUDA driver error: no peer access")
    assert cause == "None"
    assert cause1 == "RuntimeError('CUDA driver error: no peer access')"
    # The other rank waits in no collective that this one won't enter.
    assert ("rendezvous" in events) == (step != "allocating")


ARGUMENTS = {
    "nbytes 0": ({"nbytes": 0}, "ValueError: nbytes is 0; it must be a positive integer"),
    "nbytes float": ({"nbytes": 1e3}, "ValueError: nbytes is 1000.0; it must be"),
    "cpu": ({"device": "cpu"}, "ValueError: device is cpu; it must be a CUDA device"),
    "nonsense": ({"device": "gpu"}, "RuntimeError: "),
}


def give(name: str) -> tuple[str, str, list[str]]:
    return Fake().failure(**(ARGUMENTS[name][0] if dist.get_rank() == 1 else {}))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_argument_on_one_rank(run_pair, name):
    results = run_pair(give, name)
    assert_same_on_all_ranks([message for message, *_ in results])
    assert f"setting up: rank 1: {ARGUMENTS[name][1]}" in results[0][0]
    assert [events for *_, events in results] == [[], []]


def be_without_cuda() -> tuple[str, str, list[str]]:
    fake = Fake()
    fake.available = dist.get_rank() == 0
    return fake.failure()


def test_no_cuda_on_one_rank(run_pair):
    results = run_pair(be_without_cuda)
    assert_same_on_all_ranks([message for message, *_ in results])
    expected = f"rank 1: RuntimeError: torch {torch.__version__} finds no CUDA device here"
    assert expected in results[0][0]


def be_too_many() -> tuple[str, str, list[str]]:
    with mock.patch.object(peer_memory, "MAX_RANKS", 1):
        return Fake().failure()


def test_too_many_ranks(run_pair):
    results = run_pair(be_too_many)
    assert_same_on_all_ranks([message for message, *_ in results])
    assert "the group has 2 ranks; the CUDA kernels work on 1 to 1" in results[0][0]
    assert peer_memory.MAX_RANKS == 16


def disagree() -> tuple[str, str, list[str]]:
    return Fake().failure(nbytes=NBYTES + dist.get_rank())


def test_sizes_differ(run_pair):
    results = run_pair(disagree)
    assert_same_on_all_ranks([message for message, *_ in results])
    assert "ranks disagree on nbytes: [1000, 1001]" in results[0][0]


def share(uuid: bool) -> tuple[str, str, list[str]]:
    fake = Fake()
    if uuid:
        fake.device.uuid = f"GPU-{dist.get_rank() % 2}"
    return fake.failure(device=f"cuda:{dist.get_rank() if uuid else 3}")


def test_ranks_share_a_device(pool):
    results = pool.run(3, share, True)
    assert_same_on_all_ranks(results)
    assert "ranks [0, 2] share GPU GPU-0; " in results[0][0]
    assert "LocalCommunicator" in results[0][0]


def test_devices_share_an_index(run_pair):
    """As when each rank sees only its own GPU: torch would refuse it without saying why."""
    results = run_pair(share, False)
    assert_same_on_all_ranks(results)
    assert "ranks [0, 1] call different GPUs cuda:3; " in results[0][0]
    assert "CUDA_VISIBLE_DEVICES" in results[0][0]


class NcclPeers:
    """Stands in for the binding's class: writes down what is called, in what order."""

    failing = ""

    def __init__(self, device: int, nbytes: int) -> None:
        self.pointers: list[int] = []
        self.events: list = []
        self.call("allocate", device, nbytes)

    @staticmethod
    def new_meeting() -> bytes:
        return b"met by rank %d" % dist.get_rank()

    def call(self, name: str, *arguments) -> None:
        if NcclPeers.failing == name:
            raise CommunicatorError(f"NCCL: {name} failed")
        self.events.append((name, *arguments))

    def connect(self, meeting: bytes, rank: int, world_size: int) -> None:
        self.call("connect", meeting, rank, world_size)

    def map(self) -> None:
        self.call("map")
        self.pointers = [256 * (1 + rank) for rank in range(dist.get_world_size())]

    def barrier(self, stream: int) -> None:
        self.call("barrier", stream)


def allocate_nccl(failing: str = ""):
    rank = dist.get_rank()
    with (
        mock.patch.object(NcclPeers, "failing", failing if rank == 1 else ""),
        mock.patch.object(co._C, "NcclPeers", NcclPeers),
        mock.patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            # One index for all: to NCCL, only the GPUs must differ.
            get_device_properties=lambda index: SimpleNamespace(uuid=f"GPU-{rank}"),
            current_stream=lambda device: SimpleNamespace(cuda_stream=70 + device),
            synchronize=lambda device: None,
        ),
    ):
        memory = peer_memory.allocate_nccl(None, "cuda:3", NBYTES)
        memory.barrier()
        return memory


def succeed_with_nccl() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = allocate_nccl()
    assert (memory.device, memory.rank, memory.world_size) == (3, rank, world)
    assert (memory.nbytes, memory.pointers) == (NBYTES, [256 * (1 + peer) for peer in range(world)])
    assert memory._owner.events == [
        ("allocate", 3, NBYTES),
        ("connect", b"met by rank 0", rank, world),
        ("map",),
        ("barrier", 73),
        ("barrier", 73),
    ]


def test_nccl(run):
    run(succeed_with_nccl)


def fail_with_nccl(step: str) -> str:
    with pytest.raises(CommunicatorError) as info:
        allocate_nccl(step)
    return str(info.value)


@pytest.mark.parametrize("step", ["allocate", "connect", "map", "barrier"])
def test_nccl_fails_on_one_rank(run_pair, step):
    messages = run_pair(fail_with_nccl, step)
    assert_same_on_all_ranks(messages)
    assert messages[0].endswith(f"rank 1: CommunicatorError: NCCL: {step} failed")


def be_without_nccl() -> str:
    with pytest.raises(CommunicatorError) as info:
        co._C.NcclPeers(0, NBYTES)
    return str(info.value)


@pytest.mark.skipif(bool(co._C.nccl_version), reason="built with NCCL")
def test_built_without_nccl(run_pair):
    for message in run_pair(be_without_nccl):
        assert message.startswith("coconet_ops was built without NCCL; ")
