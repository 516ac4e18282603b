"""Finds nvcc and NCCL's headers and says how kernels are compiled, for setup.py and cuda_gate.py.

As a program: prints where nvcc is, or fails with what was looked for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Code for the data center GPUs, and PTX for what comes later. The PTX is of compute_90, since that
# of an "a" or "f" target serves no other architecture, and whatever can't run this code is newer
# than 9.0 (8.6 and 8.9 run sm_80's).
DEFAULT_TARGETS = ("sm_80", "sm_90a", "sm_100a", "compute_90")


class Unavailable(Exception):
    """Something isn't there or can't be used; the text says what was looked for."""


@dataclass(frozen=True)
class Toolkit:
    nvcc: str
    version: str
    library_dir: str  # of libcudart_static.a


@dataclass(frozen=True)
class Nccl:
    include: str
    version: str


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise Unavailable(f"{command[0]} can't be run ({error.strerror})") from None
    if result.returncode:
        text = (result.stderr + result.stdout).strip()
        raise Unavailable(f"`{' '.join(command)}` failed: {text}")
    return result.stdout + result.stderr


def find_nvcc(environment: Mapping[str, str] = os.environ) -> str:
    """CUDA_HOME decides alone if it is set; then PATH, then /usr/local/cuda."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home:
        found = shutil.which("nvcc", path=str(Path(home, "bin")))
        where = f"{home}/bin, where CUDA_HOME points"
    else:
        paths = [environment.get("PATH", ""), "/usr/local/cuda/bin"]
        found = shutil.which("nvcc", path=os.pathsep.join(paths))
        where = "PATH or /usr/local/cuda/bin; CUDA_HOME is not set"
    if not found:
        raise Unavailable(f"no nvcc in {where}")
    return found


def find_toolkit(environment: Mapping[str, str] = os.environ) -> Toolkit:
    nvcc = find_nvcc(environment)
    version = re.search(r"\bV(\d[\d.]*)", _output(nvcc, "--version"))
    if not version:
        raise Unavailable(f"`{nvcc} --version` names no version")
    # nvcc may be a wrapper far from its toolkit; it knows itself where it links from.
    plan = _output(nvcc, "--dryrun", "-x", "cu", os.devnull, "-o", os.devnull)
    folders = re.findall(r'"-L([^"]+)"', plan)
    for folder in folders:
        if Path(folder, "libcudart_static.a").exists():
            return Toolkit(nvcc, version[1], str(Path(folder).resolve()))
    raise Unavailable(f"{nvcc} has no libcudart_static.a (in {', '.join(folders) or 'no folder'})")


def find_nccl(environment: Mapping[str, str] = os.environ) -> Nccl:
    """NCCL_HOME decides alone if it is set; then the pip package."""
    home = environment.get("NCCL_HOME")
    if home:
        include = Path(home, "include")
        where = f"{include}, where NCCL_HOME points"
    else:
        folders = [Path(path, "nvidia", "nccl", "include") for path in sys.path]
        include = next((folder for folder in folders if folder.is_dir()), Path())
        where = "the pip package nvidia-nccl-cu13; NCCL_HOME is not set"
    # nccl_device.h came with 2.28.
    for header in ("nccl.h", "nccl_device.h"):
        if not (include / header).is_file():
            raise Unavailable(f"no {header} in {where}")
    text = (include / "nccl.h").read_text()
    numbers = dict(re.findall(r"^#define NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", text, re.MULTILINE))
    if len(numbers) != 3:
        raise Unavailable(f"{include}/nccl.h names no version")
    return Nccl(str(include), "{MAJOR}.{MINOR}.{PATCH}".format(**numbers))


def find_targets(environment: Mapping[str, str] = os.environ) -> list[str]:
    """nvcc's names (sm_90a, compute_90) of what TORCH_CUDA_ARCH_LIST asks for."""
    architectures = environment.get("TORCH_CUDA_ARCH_LIST", "")
    found: list[str] = []
    for entry in re.split(r"[;,\s]+", architectures):
        if not entry:
            continue
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if not match:
            raise Unavailable(
                f"TORCH_CUDA_ARCH_LIST={architectures!r}: {entry!r} is no architecture; "
                "write it as 8.0, 9.0a or 9.0+PTX, separated by ; or spaces"
            )
        major, minor, suffix, ptx = match.groups()
        found.append(f"sm_{major}{minor}{suffix}")
        if ptx:
            found.append(f"compute_{major}{minor}")
    return list(dict.fromkeys(found)) or list(DEFAULT_TARGETS)


def gencode(targets: Sequence[str]) -> list[str]:
    return [f"-gencode=arch={t.replace('sm_', 'compute_')},code={t}" for t in targets]


def nvcc_flags(
    targets: Sequence[str], werror: bool, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """For every file of csrc/cuda and csrc/nccl, from the root of the checkout."""
    compiler = environment.get("CXX") if "NVCC_CCBIN" not in environment else None
    return [
        "-std=c++17",
        "-O3",
        "--fmad=false",  # as -ffp-contract=off: where an fma is meant, it is written
        "-Icsrc",
        "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra",
        "-Xcompiler=-Wno-unknown-pragmas",  # of loops, for the device only
        *(["-Werror=all-warnings"] if werror else []),
        *gencode(targets),
        f'-DCOCONET_CUDA_TARGETS="{",".join(targets)}"',  # for build_info()
        *(["-ccbin", compiler] if compiler else []),
    ]


if __name__ == "__main__":
    try:
        print(find_toolkit().nvcc)
    except Unavailable as error:
        sys.exit(f"no nvcc: {error}")
