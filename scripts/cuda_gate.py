"""Compile gate of the CUDA part: every kernel, for every architecture, without a GPU.

Compiles csrc/cuda/*.cu, and csrc/nccl/*.cu where NCCL's headers are, with warnings as errors, and
fails if

- a kernel spills registers, has a stack frame or touches local memory,
- an architecture lacks a kernel or dtype of the table `KERNELS`, or has one that isn't in it,
- a kernel that reads and writes peers' memory does so with less than 128 bits at a time, or its
  signals are not ordered at system scope.

Writes every kernel's resources to build/cuda-gate.json and prints them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda_toolkit

TARGETS = ("sm_80", "sm_90a", "sm_100a")

SUMMED = ("f32", "bf16", "f16", "f64", "i64", "i32")
FLOATS = ("f32", "bf16", "f16")
WIDTHS = ("u8", "u16", "i32", "i64")  # where only the size of an element matters
# Kernels by name, with the dtypes that their first template argument has; () where it has none.
KERNELS = {
    "all_reduce_kernel": SUMMED,
    "all_reduce_one_shot_kernel": SUMMED,
    "reduce_scatter_kernel": SUMMED,
    "reduce_scatter_one_shot_kernel": SUMMED,
    "all_gather_kernel": WIDTHS,
    "prepare_kernel": (),  # of rs_adam_ag's lists
    "rs_adam_ag_kernel": FLOATS,
    "barrier_kernel": (),
}
# The same of csrc/nccl: NCCL's headers say how they access peers.
NCCL_KERNELS = {"nccl_pointers_kernel": (), "nccl_barrier_kernel": ()}
# Those that move no data between ranks.
NO_DATA = {"barrier_kernel", "prepare_kernel", *NCCL_KERNELS}
DTYPES = {
    "float": "f32",
    "coconet::bf16_t": "bf16",
    "coconet::f16_t": "f16",
    "double": "f64",
    "unsigned char": "u8",
    "unsigned short": "u16",
    # Sums of integers are unsigned ones, since overflow must wrap.
    "unsigned long": "i64",
    "unsigned int": "i32",
}

# What SASS must hold somewhere, and what it must not. Other instructions may lie between.
_BETWEEN = r"(?:\n.*){1,12}?"
PEER_RULES = {
    "128-bit loads from peers": r"LDG?\.E\.128\.STRONG\.SYS",
    "128-bit stores to peers": r"STG?\.E\.128\.STRONG\.SYS",
    "an acquire at system scope": r"LDG?\.E\.STRONG\.SYS\b.*" + _BETWEEN + r"CCTL\.IVALL",
    "a release at system scope": r"MEMBAR\.\w+\.SYS\b.*" + _BETWEEN + r"STG?\.E\.STRONG\.SYS",
}
LOCAL_MEMORY = r"\b(?:LDL|STL)\b"


def demangled(names: list[str]) -> list[str]:
    text = subprocess.run(
        ["c++filt"], input="\n".join(names), text=True, capture_output=True, check=True
    )
    return text.stdout.splitlines()


def kernel_and_dtype(signature: str) -> tuple[str, str]:
    """("rs_adam_ag", "bf16") of `void coconet::cuda::rs_adam_ag<coconet::bf16_t>(...)`."""
    match = re.match(
        r"(?:void )?(?:(?:\w+|\(anonymous namespace\))::)*(\w+)(?:<([^,<>()]+))?", signature
    )
    assert match, signature
    return match[1], DTYPES.get(match[2] or "", match[2] or "")


def compile_one(toolkit: cuda_toolkit.Toolkit, source: Path, target: str, cubin: Path, extra):
    """Resources by mangled name, as ptxas tells them."""
    cubin.parent.mkdir(parents=True, exist_ok=True)
    flags = cuda_toolkit.nvcc_flags([target], werror=True)
    command = [
        toolkit.nvcc,
        *flags,
        *extra,
        "--resource-usage",
        "--cubin",
        str(source),
        "-o",
        str(cubin),
    ]
    result = subprocess.run(command, text=True, capture_output=True)
    if result.returncode:
        raise SystemExit(f"{source} for {target}:\n{result.stdout}{result.stderr}")
    kernels: dict[str, dict] = {}
    name = ""
    for line in result.stderr.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name = entry[1]
            kernels[name] = {"stack": 0, "spills": 0}
        elif frame := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            # Also those of functions that weren't inlined: they count for the kernel before.
            kernels[name]["stack"] += int(frame[1])
            kernels[name]["spills"] += int(frame[2]) + int(frame[3])
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            barriers = re.search(r"used (\d+) barriers", line)
            kernels[name] |= {
                "registers": int(used[1]),
                "shared": int(shared[1]) if shared else 0,
                "barriers": int(barriers[1]) if barriers else 0,
            }
    return kernels


def disassembled(cuobjdump: str, cubin: Path) -> dict[str, str]:
    """SASS by mangled name."""
    # cuobjdump finds its nvdisasm in PATH only.
    path = os.pathsep.join([str(Path(cuobjdump).parent), os.environ.get("PATH", "")])
    result = subprocess.run(
        [cuobjdump, "-sass", str(cubin)],
        text=True,
        capture_output=True,
        env=os.environ | {"PATH": path},
    )
    if result.returncode:
        raise SystemExit(f"cuobjdump {cubin}: {result.stdout}{result.stderr}")
    # An instruction's line, without the encoding that goes on in the next.
    lines = re.findall(
        r"^\s*(?:Function : \w+|/\*[0-9a-f]{4,}\*/.*?;)", result.stdout, re.MULTILINE
    )
    parts = re.split(r"^\s*Function : (\w+)$", "\n".join(lines), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def find_cuobjdump() -> str:
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]
    folders += [str(Path(path, "nvidia/cu13/bin")) for path in sys.path]
    found = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    if not found:
        raise SystemExit("no cuobjdump; `pip install -r requirements-cuda.txt`")
    return found


def problems_of(row: dict, sass: str) -> list[str]:
    found = []
    if row["stack"]:
        found.append(f"a stack frame of {row['stack']} bytes")
    if row["spills"]:
        found.append(f"{row['spills']} bytes of spills")
    if local := re.findall(LOCAL_MEMORY, sass):
        found.append(f"{len(local)} accesses to local memory")
    if row["kernel"] not in NO_DATA:
        found += [f"lacks {rule}" for rule, text in PEER_RULES.items() if not re.search(text, sass)]
    return found


def missing_or_unknown(rows: list[dict], kernels: dict[str, tuple]) -> list[str]:
    """Compares what was compiled with the table of kernels."""
    found = []
    compiled = defaultdict(set)
    for row in rows:
        compiled[row["target"]].add((row["kernel"], row["dtype"]))
    expected = {(kernel, dtype) for kernel, dtypes in kernels.items() for dtype in dtypes or ("",)}
    for target in TARGETS:
        for kernel, dtype in sorted(expected - compiled[target]):
            found.append(f"{target} has no {kernel} {dtype}".rstrip())
        for kernel, dtype in sorted(compiled[target] - expected):
            found.append(f"{target} has {kernel} {dtype}, which the gate's table doesn't know")
    return found


def table(rows: list[dict]) -> str:
    """One line for each kernel and dtype: the most that any of its instances uses, by target."""
    lines = [f"{'kernel':<32}{'dtype':<8}" + "".join(f"{t:>12}" for t in TARGETS)]
    groups = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["kernel"], row["dtype"]][row["target"]].append(row)
    for (kernel, dtype), by_target in sorted(groups.items()):
        cells = []
        for target in TARGETS:
            most = [max(r[key] for r in by_target[target]) for key in ("registers", "shared")]
            cells.append(f"{most[0]} {most[1]:>6}" if by_target[target] else "-")
        lines.append(f"{kernel:<32}{dtype:<8}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join([*lines, "(registers per thread, bytes of static shared memory)"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("build/cuda-gate.json"))
    parser.add_argument("--folder", type=Path, default=Path("build/cuda-gate"), help="for cubins")
    arguments = parser.parse_args()
    try:
        toolkit = cuda_toolkit.find_toolkit()
    except cuda_toolkit.Unavailable as error:
        print(f"no nvcc: CUDA kernels were not compiled ({error})")
        return
    cuobjdump = find_cuobjdump()
    sources = sorted(Path("csrc/cuda").glob("*.cu"))
    extra, expected = [], KERNELS
    try:
        nccl = cuda_toolkit.find_nccl()
        extra, expected = ["-isystem", nccl.include], KERNELS | NCCL_KERNELS
        sources += sorted(Path("csrc/nccl").glob("*.cu"))
        print(f"nvcc {toolkit.version}, NCCL {nccl.version}: {len(sources)} files")
    except cuda_toolkit.Unavailable as error:
        print(f"nvcc {toolkit.version}: {len(sources)} files; csrc/nccl was not compiled: {error}")

    def examine(job: tuple[Path, str]) -> tuple[list[dict], list[str]]:
        source, target = job
        cubin = arguments.folder / f"{source.stem}.{target}.cubin"
        kernels = compile_one(toolkit, source, target, cubin, extra)
        sass = disassembled(cuobjdump, cubin) if kernels else {}
        rows, problems = [], []
        for name, signature in zip(kernels, demangled(list(kernels)), strict=True):
            kernel, dtype = kernel_and_dtype(signature)
            row = {"kernel": kernel, "dtype": dtype, "target": target, **kernels[name]}
            row |= {"file": str(source), "signature": signature}
            rows.append(row)
            if found := problems_of(row, sass[name]):
                problems.append(f"{target}: {kernel} {dtype}: {', '.join(found)}")
        return rows, problems

    jobs = [(source, target) for source in sources for target in TARGETS]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(examine, jobs))
    rows = [row for result in results for row in result[0]]
    problems = [problem for result in results for problem in result[1]]
    problems += missing_or_unknown(rows, expected)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    record = {"nvcc": toolkit.version, "targets": TARGETS, "kernels": rows, "problems": problems}
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))
    print(f"{len(rows)} instances; {arguments.json} has them all")
    if problems:
        raise SystemExit("\n".join(["cuda-gate failed:", *problems]))


if __name__ == "__main__":
    main()
