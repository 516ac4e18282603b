"""Every op on two ranks of a device, at small sizes: for compute-sanitizer, under which kernels
take very long. Answers are checked too. On a GPU also: streams and graphs.

Torch's default device stays the CPU here, unlike in the tests: a tensor that the library makes
without naming its device ends in an error.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch

root = Path(__file__).parents[2]
sys.path[:0] = [str(root), str(root / "tests")]
from harness import emulated_backend  # noqa: E402

import coconet_ops as co  # noqa: E402

WORLD = 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
SIZES = (1, 7, 1025, 70_001)  # the last one is more than a single exchange, and staged in chunks


def tensor(comm, values: torch.Tensor, heap: bool, offset: int = 0) -> torch.Tensor:
    numel = values.numel() + offset
    if heap:
        buffer = comm.empty(numel, dtype=values.dtype)
    else:
        buffer = torch.empty(numel, dtype=values.dtype, device=comm.device)
    return buffer[offset:].copy_(values)


def collectives(comm) -> None:
    for dtype in DTYPES:
        for size in SIZES:
            for heap in (True, False):
                for offset in (0, 1):
                    own = (torch.arange(size) % 50 + comm.rank).to(dtype)
                    total = (2 * (torch.arange(size) % 50) + 1).to(dtype)
                    x = tensor(comm, own, heap, offset)
                    what = f"{dtype}, {size} elements, heap {heap}, offset {offset}"
                    assert torch.equal(co.all_reduce(x, group=comm).cpu(), total), what
                    shard = co.reduce_scatter(x, group=comm)
                    assert torch.equal(shard.cpu(), total.tensor_split(WORLD)[comm.rank]), what
                    gathered = co.all_gather(shard, group=comm)
                    assert torch.equal(gathered.cpu(), total), what
                    co.all_reduce_(x, group=comm)
                    assert torch.equal(x.cpu(), total), what


def adam(comm) -> None:
    for dtype in DTYPES[:3]:
        for heap in (True, False):
            sizes = (5, 64, 1000, 40_003)
            params = [tensor(comm, torch.ones(n, dtype=dtype), heap) for n in sizes]
            grads = [tensor(comm, torch.full((n,), 0.5, dtype=dtype), heap) for n in sizes]
            state = co.AdamState(params, group=comm)
            for _ in range(2):
                co.rs_adam_ag_(params, grads, state, lr=0.25)
            assert state.steps == [2] * len(sizes)
            for p in params:
                expected = torch.full((p.numel(),), 0.5)
                torch.testing.assert_close(p.cpu().float(), expected, rtol=0, atol=1e-3)
    weight = torch.nn.Parameter(torch.ones(300, device=comm.device))
    optimizer = co.optim.DistributedFusedAdam([weight], lr=0.25, process_group=comm)
    co.copy_to_group(weight, group=comm).sum().backward()
    optimizer.step()
    assert torch.allclose(weight.detach().cpu(), torch.full((300,), 0.75))


def work(comm) -> None:
    collectives(comm)
    comm.barrier()
    adam(comm)
    comm.barrier()


def on_a_side_stream(local) -> None:
    """The ranks' threads use the caller's stream; calls on another one come after the earlier."""
    side = torch.cuda.Stream()

    def add(comm, x):
        return torch.cuda.current_stream(), co.all_reduce_(x, group=comm)

    xs = local.run(lambda comm: comm.empty(SIZES[-1]).fill_(1))
    for calls in range(3):
        torch.cuda.current_stream().wait_stream(side)
        local.run(lambda comm: add(comm, xs[comm.rank]))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            streams = [stream for stream, _ in local.run(lambda comm: add(comm, xs[comm.rank]))]
        assert streams == [side] * WORLD
        side.synchronize()
        for x in xs:
            assert (x == WORLD ** (2 * calls + 2)).all()


def in_a_graph(local) -> None:
    """Captured by one thread, replayed between eager calls."""
    for heap in (True, False):
        xs = local.run(lambda comm, heap=heap: tensor(comm, torch.ones(SIZES[-1]), heap))
        params = local.run(lambda comm, heap=heap: [tensor(comm, torch.ones(3000), heap)])
        grads = local.run(lambda comm, heap=heap: [tensor(comm, torch.ones(3000), heap)])
        states = local.run(lambda comm, params=params: co.AdamState(params[comm.rank], group=comm))

        def step(comm, xs=xs, params=params, grads=grads, states=states):
            r = comm.rank
            co.all_reduce_(xs[r], op="avg", group=comm)
            co.rs_adam_ag_(params[r], grads[r], states[r], lr=0.125)

        local.run(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            local.run(step)
            local.run(step)
        graph.replay()
        local.run(step)
        graph.replay()
        torch.cuda.synchronize()
        for x, (p,) in zip(xs, params, strict=True):
            assert (x == 1).all()
            expected = torch.full((3000,), 1 - 6 * 0.125)
            torch.testing.assert_close(p.cpu(), expected, rtol=0, atol=1e-5)
        assert local.run(lambda comm, states=states: states[comm.rank].steps) == [[6]] * WORLD


def main(device: str) -> None:
    options = {"device": device}
    if device == "emulated":
        options = {"_backend": emulated_backend(), "_launch": {"blocks": 2, "threads": 64}}
    timeout = timedelta(seconds=60)
    with co.LocalCommunicator(WORLD, heap_bytes=8 << 20, timeout=timeout, **options) as local:
        local.run(work)
        if device != "emulated":
            on_a_side_stream(local)
            in_a_graph(local)
    print(f"small cases on {device}: all answers are right")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["cuda"]))
