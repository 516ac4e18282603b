"""Start the ranks: torch.multiprocessing here, or torchrun when it already has."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .model import BenchError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=2)
GRACE_SECONDS = 2.0  # for the other ranks to report a lost peer, then to die of SIGTERM
INTERRUPTED = 130


def launch(body: Callable[[T], None], settings: T, ranks: int) -> int:
    """Run body(settings) on every rank and return the exit code."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return _join_torchrun(body, settings)
    return _spawn(body, settings, ranks)


def _join_torchrun(body: Callable[[T], None], settings: T) -> int:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        body(settings)
        _leave()
    except BenchError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _spawn(body: Callable[[T], None], settings: T, ranks: int) -> int:
    # malloc keeps large blocks, so that no call pays for fresh pages
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 40))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 40))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name may not resolve
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Ctrl-C waits until every child is known; the tracker would unblock it if started later
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    context = mp.start_processes(
        _rank_main, (ranks, store.port, body, settings), ranks, join=False, daemon=True
    )
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while not context.join(grace_period=GRACE_SECONDS):
            pass
    except KeyboardInterrupt:
        return INTERRUPTED
    except mp.ProcessRaisedException as error:
        return _complain(_reason(error))
    except mp.ProcessExitedException as error:
        if error.signal_name == "SIGINT":  # the terminal signals the ranks too, and one was first
            return INTERRUPTED
        how = error.signal_name or f"exit code {error.exit_code}"
        return _complain(f"rank {error.error_index} ended with {how}")
    finally:
        for process in context.processes:
            process.kill()
            process.join()
        for path in context.error_files:
            Path(path).unlink(missing_ok=True)
    return 0


def _rank_main(rank: int, ranks: int, port: int, body: Callable[[T], None], settings: T) -> None:
    # the parent cleans up after Ctrl-C; a rank deep in a wait must not outlive it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    body(settings)
    _leave()


def _leave() -> None:
    # gloo's thread must drop the last Python tensor before the interpreter ends, or it aborts
    dist.barrier()
    dist.destroy_process_group()


def _reason(error: mp.ProcessRaisedException) -> str:
    """Our own errors speak for themselves, others need their traceback."""
    _, _, ours = error.msg.partition(f"{BenchError.__module__}.{BenchError.__name__}: ")
    return ours.strip() or f"rank {error.error_index} failed:{error.msg.rstrip()}"


def _complain(message: str) -> int:
    print(f"coconet-bench: {message}", file=sys.stderr)
    return 1
