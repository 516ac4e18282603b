"""What a process holds of the system, to find what wasn't given back."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def resources() -> dict[str, Counter]:
    """What this process holds: file descriptors, shared mappings, threads."""
    descriptors = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # listdir's own descriptor
            target = os.readlink(f"/proc/self/fd/{name}")
            descriptors[target.split(":")[0] if target.startswith("socket:") else target] += 1
    maps = Path("/proc/self/maps").read_text().splitlines()
    named = [fields[5] for line in maps if len(fields := line.split(maxsplit=5)) == 6]
    mappings = Counter(name for name in named if "memfd:" in name or name.startswith("/dev/shm/"))
    threads = Counter(threads=len(os.listdir("/proc/self/task")))
    return {"descriptors": descriptors, "mappings": mappings, "threads": threads}


@contextlib.contextmanager
def no_more_memory() -> Iterator[None]:
    """Inside, this process gets no more than a few small pieces of memory."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (4 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def leaked(before: dict[str, Counter]) -> dict[str, dict[str, int]]:
    """What this process holds now and didn't hold before; {} if nothing."""
    gc.collect()
    for _ in range(50):  # a thread that was just joined may linger in /proc
        now = resources()
        more = {kind: dict(now[kind] - before[kind]) for kind in now}
        more = {kind: names for kind, names in more.items() if names}
        if not more:
            break
        time.sleep(0.02)
    return more
