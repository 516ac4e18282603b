"""The run on a machine with a GPU, which may lack a network: `make gpu`.

Builds in place for the first GPU, runs the tests on virtual ranks of it, small cases under
compute-sanitizer, and the benchmark; writes bench/results/NAME-OF-THE-GPU.json and ends in a table.
Needs nvcc, g++, and a Python with torch for CUDA, pytest and ninja; downloads nothing.

A stage that fails doesn't keep the others from running, but the exit status tells. Each has a time
limit, all together too; a stage that would get too little time is skipped, which counts as failed.

`--device emulated` goes through the same stages, but for the build, on the emulator.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"

LIMIT = 530.0  # seconds, of all stages together
# Seconds of it for each stage; what one doesn't use is for the later ones.
SHARES = {"build": 180, "tests": 150, "sanitizer": 60, "benchmark": 140}
LEAST = 15  # seconds: with less a stage doesn't start
TABLE_SECONDS = 25  # of the benchmark's limit, for the case that runs when its time is up
# On the emulator a few of the tests show that they run.
EMULATED_TESTS = ("-k", "test_every_small_size and world2")


@dataclass
class Outcome:
    stage: str
    ok: bool
    text: str
    seconds: float = 0.0


@dataclass
class Run:
    """The run's clock, and what has come out of its stages."""

    limit: float
    to_come: list[str]
    begin: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)

    def left(self) -> float:
        return self.limit - (time.monotonic() - self.begin)

    def stage(self, name: str, start: Callable[[float], str]) -> None:
        """start(seconds it may take): what came out of it; raises Failed."""
        allowed = self.left() * SHARES[name] / sum(SHARES[stage] for stage in self.to_come)
        self.to_come.remove(name)
        print(f"== {name}, {max(0, allowed):.0f} s at most", flush=True)
        if allowed < LEAST:
            text = f"skipped: {max(0, allowed):.0f} s are left for it"
            self.outcomes.append(Outcome(name, False, text))
            return
        begin = time.monotonic()
        try:
            ok, text = True, start(allowed)
        except Failed as failure:
            ok, text = False, str(failure)
        except Exception as error:  # the other stages still run
            ok, text = False, f"FAILED: {type(error).__name__}: {error}"
        self.outcomes.append(Outcome(name, ok, text, time.monotonic() - begin))
        print(f"== {name}: {text}", flush=True)


class Failed(Exception):
    pass


def execute(
    command: Sequence[str | Path], seconds: float, environment: dict[str, str] | None = None
) -> None:
    """Runs a program from the root of the checkout, and ends it with its children when the time is
    up. Raises Failed."""
    program = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **(environment or {})}, start_new_session=True
    )
    try:
        code = program.wait(seconds)
    except subprocess.TimeoutExpired:
        raise Failed(f"FAILED: not done after {seconds:.0f} s") from None
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
    if code:
        raise Failed(f"FAILED: exit status {code}")


def missing_gpu() -> str:
    """Why there is no GPU to run on, or an empty text."""
    try:
        import torch
    except ModuleNotFoundError:
        return "this Python has no torch"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def architecture(capability: tuple[int, int]) -> str:
    """As TORCH_CUDA_ARCH_LIST has it: with the features of this architecture alone from 9.0 on."""
    major, minor = capability
    return f"{major}.{minor}" + ("a" if major >= 9 else "")


def build(seconds: float) -> str:
    import torch

    target = architecture(torch.cuda.get_device_capability(0))
    environment = {
        "COCONET_CUDA": "1",
        "COCONET_NCCL": os.environ.get("COCONET_NCCL", "auto"),
        "TORCH_CUDA_ARCH_LIST": target,
    }
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    execute(command, seconds, environment)
    return f"built for {target}"


def test_files(backend: str) -> list[str]:
    """The test files that have tests on this backend. The others may need packages that aren't
    there."""
    marker = re.compile(rf'backends\([^)]*"{backend}"')
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    return [f"tests/{path.name}" for path in paths if marker.search(path.read_text())]


def tests(backend: str, arguments: Sequence[str], seconds: float) -> str:
    # torch.cuda.is_available() without a CUDA context in the process that only collects.
    environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--backend", backend]
    execute([*command, *test_files(backend), *arguments], seconds, environment)
    return "all passed"


def find_sanitizer() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    places = (home / "bin/compute-sanitizer", home / "compute-sanitizer/compute-sanitizer")
    known = next((str(path) for path in places if path.is_file()), None)
    return shutil.which("compute-sanitizer") or known


def sanitizer(device: str, seconds: float) -> str:
    command = [sys.executable, "tests/cuda/small_cases.py", device]
    program = find_sanitizer() if device != "emulated" else None
    if program is None:
        execute(command, seconds)
        why = "the emulator has its own checks" if device == "emulated" else "not installed"
        return f"small cases pass, without compute-sanitizer: {why}"
    # Each tensor is an allocation, so that accesses beyond its end are seen.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    execute([program, *options, *command], seconds, environment)
    return "small cases pass; memcheck found nothing"


def benchmark(device: str, record: Path, seconds: float) -> str:
    limit = str(seconds - TABLE_SECONDS)
    execute(
        [
            *(sys.executable, "-m", "bench.one_gpu"),
            *("--device", device, "--seconds", limit, "--json", record),
        ],
        seconds,
    )
    return "all answers are right"


def keep(record: Path, folder: Path, outcomes: Sequence[Outcome]) -> Path | None:
    """Adds the stages to the benchmark's record and puts it where it belongs."""
    if not record.exists():
        return None
    result = json.loads(record.read_text())
    result["stages"] = {
        o.stage: {"ok": o.ok, "outcome": o.text, "seconds": round(o.seconds, 1)} for o in outcomes
    }
    name = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "emulated"])
    parser.add_argument("--stages", default=",".join(SHARES), help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="default: %(default)s")
    parser.add_argument("--results", type=Path, help=f"folder; default: {RESULTS.name}")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="more arguments")
    options = parser.parse_args(arguments)
    chosen = options.stages.split(",")
    if unknown := set(chosen) - set(SHARES):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(SHARES)}")
    emulated = options.device == "emulated"
    if emulated:
        chosen = [name for name in chosen if name != "build"]
    if emulated and options.results is None:
        parser.error("--device emulated needs --results: its times say nothing about a GPU")
    if not emulated and (missing := missing_gpu()):
        sys.exit(f"make gpu: {missing} ({sys.executable})")

    run = Run(options.seconds, list(chosen))
    selected = options.pytest or (EMULATED_TESTS if emulated else ())
    with tempfile.TemporaryDirectory(prefix="coconet-gpu-") as folder:
        record = Path(folder, "record.json")
        steps = {
            "build": build,
            "tests": lambda seconds: tests(options.device, selected, seconds),
            "sanitizer": lambda seconds: sanitizer(options.device, seconds),
            "benchmark": lambda seconds: benchmark(options.device, record, seconds),
        }
        for name in chosen:
            run.stage(name, steps[name])
        path = keep(record, options.results or RESULTS, run.outcomes)

    print()
    for outcome in run.outcomes:
        print(f"{outcome.stage:10} {outcome.seconds:5.0f} s  {outcome.text}")
    if path:
        print(f"written: {os.path.relpath(path)}")
    return 0 if all(outcome.ok for outcome in run.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
