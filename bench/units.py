"""Sizes and times as people write them."""

from __future__ import annotations

import argparse
import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)B?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """4096, 4K, 16M, 1G: powers of 1024, as in nccl-tests."""
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _FACTORS[match[2].upper()] if match else 0
    if size < 1 or size != int(size):
        raise argparse.ArgumentTypeError(f"'{text}' is no size: write 4096, 4K, 16M or 1G")
    return int(size)


def format_size(size: float) -> str:
    """The largest of K, M, G that leaves a short number."""
    for suffix in ("", "K", "M"):
        if size < 1023.5:  # a shard's rounding doesn't make 1M into 1024K
            return f"{size:.4g}{suffix}"
        size /= 1024
    return f"{size:.4g}G"


def format_time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def format_ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
