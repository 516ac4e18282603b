"""scripts/gpu_run.py and the benchmark of virtual ranks, on the emulator."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import coconet_ops as co

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import gpu_run  # noqa: E402

from coconet_ops.bench import one_gpu  # noqa: E402


def program(*arguments):
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return result.returncode, result.stdout


def test_all_stages(tmp_path):
    code, output = program(
        "scripts/gpu_run.py", "--device", "emulated", "--results", tmp_path, "--seconds", "400"
    )
    assert code == 0, output
    result = json.loads((tmp_path / "emulated.json").read_text())
    assert list(result["stages"]) == ["tests", "sanitizer", "benchmark"]
    assert all(stage["ok"] for stage in result["stages"].values()), output
    assert result["copy_gb_per_s"] > 0 and result["failures"] == []
    assert {case["op"] for case in result["cases"]} == set(one_gpu.FORMULAS)
    for case in result["cases"]:
        assert {"coconet", case["baseline"]} <= set(case["candidates"])
        for numbers in case["candidates"].values():
            low, median, high = numbers["seconds"]
            assert 0 < low <= median <= high
            assert numbers["moved_gb_per_s"] == pytest.approx(case["moved_bytes"] / median / 1e9)
    text = json.dumps(result)
    assert str(ROOT) not in text and str(tmp_path) not in text, "paths"
    *_, last = output.strip().splitlines()
    assert last.startswith("written: ") and "small cases pass" in output


def test_without_a_gpu_it_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, output = program("scripts/gpu_run.py", "--results", tmp_path)
    assert code == 1 and "torch finds no CUDA device" in output
    assert not list(tmp_path.iterdir())


def test_times_of_the_emulator_are_no_results():
    code, output = program("scripts/gpu_run.py", "--device", "emulated")
    assert code == 2 and "--results" in output


# --- stages --------------------------------------------------------------------------------------


def test_a_stage_that_fails_lets_the_others_run():
    def fails(seconds):
        gpu_run.execute([sys.executable, "-c", "raise SystemExit(3)"], seconds)

    def breaks(seconds):
        raise KeyError("nothing")

    run = gpu_run.Run(1000, ["build", "tests", "benchmark"])
    run.stage("build", fails)
    run.stage("tests", breaks)
    run.stage("benchmark", lambda seconds: "fine")
    assert [(o.ok, o.text) for o in run.outcomes] == [
        (False, "FAILED: exit status 3"),
        (False, "FAILED: KeyError: 'nothing'"),
        (True, "fine"),
    ]


def test_a_stage_without_time_is_skipped():
    run = gpu_run.Run(10, ["benchmark"])
    run.stage("benchmark", lambda seconds: pytest.fail("it ran"))
    [outcome] = run.outcomes
    assert not outcome.ok and outcome.text == "skipped: 10 s are left for it"


def test_time_that_a_stage_does_not_use_is_for_the_later_ones():
    stages = list(gpu_run.SHARES)
    run = gpu_run.Run(sum(gpu_run.SHARES.values()), list(stages))
    allowed = {}
    for name in stages:
        run.stage(name, lambda seconds, name=name: allowed.setdefault(name, seconds) and "fine")
    assert allowed["build"] == pytest.approx(gpu_run.SHARES["build"], abs=5)
    assert allowed["tests"] > gpu_run.SHARES["tests"] + 10
    assert allowed["benchmark"] == pytest.approx(sum(gpu_run.SHARES.values()), abs=5)


def test_a_program_ends_with_its_children_when_its_time_is_up(tmp_path):
    file = tmp_path / "alive"
    child = f"import time\nwhile True: open({str(file)!r}, 'w').close(); time.sleep(0.01)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(gpu_run.Failed, match="not done after 2 s"):
        gpu_run.execute([sys.executable, "-c", parent], 2)
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
    time.sleep(0.3)
    assert not file.exists()


@pytest.fixture
def commands(monkeypatch):
    """What the stages would execute: (command, seconds, environment)."""
    executed = []
    monkeypatch.setattr(gpu_run, "execute", lambda *arguments: executed.append(arguments))
    return executed


def test_builds_for_this_gpu_alone(commands, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert gpu_run.build(100) == "built for 9.0a"
    [(command, seconds, environment)] = commands
    assert command[1:] == ["setup.py", "-q", "build_ext", "--inplace"] and seconds == 100
    assert environment["COCONET_CUDA"] == "1" and environment["TORCH_CUDA_ARCH_LIST"] == "9.0a"


def test_small_cases_run_under_the_sanitizer_where_there_is_one(commands, monkeypatch):
    monkeypatch.setattr(gpu_run, "find_sanitizer", lambda: "/bin/compute-sanitizer")
    assert "memcheck found nothing" in gpu_run.sanitizer("cuda", 50)
    monkeypatch.setattr(gpu_run, "find_sanitizer", lambda: None)
    assert "without compute-sanitizer: not installed" in gpu_run.sanitizer("cuda", 50)
    (watched, _, environment), (plain, _) = commands
    assert watched[0] == "/bin/compute-sanitizer" and watched[-3:] == plain
    assert "--error-exitcode" in watched and "PYTORCH_NO_CUDA_MEMORY_CACHING" in environment


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 0), "8.0"), ((8, 9), "8.9"), ((9, 0), "9.0a"), ((10, 3), "10.3a")]
)
def test_architecture(capability, name):
    assert gpu_run.architecture(capability) == name


def test_files_of_a_backend():
    files = gpu_run.test_files("cuda")
    assert "tests/test_all_reduce.py" in files and "tests/test_rs_adam_ag.py" in files
    assert "tests/test_bench.py" not in files, "it needs what isn't there"


def test_only_the_tests_of_a_backend():
    command = ("-m", "pytest", "--collect-only", "-q", "--backend", "local")
    code, output = program(*command, "tests/test_reduce_scatter.py", "tests/test_native.py")
    chosen = [line for line in output.splitlines() if "::" in line]
    assert code == 0 and len(chosen) > 3, output
    assert all("local" in line and "test_native" not in line for line in chosen), output


# --- the benchmark -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dtype", "moved"),
    [
        ("all_reduce", torch.bfloat16, 4 * 200 + 4 * 200),
        ("reduce_scatter", torch.bfloat16, 4 * 200 + 200),
        ("all_gather", torch.float32, 400 + 4 * 400),
        # Of each slice of 25: gradients of 4 ranks, state in and out, weights of 4 ranks.
        ("rs_adam_ag", torch.bfloat16, 4 * 25 * (4 * 2 + 12 + 12 + 4 * 2)),
        ("rs_adam_ag", torch.float32, 4 * 25 * (4 * 4 + 12 + 8 + 4 * 4)),
    ],
)
def test_bytes_that_must_move(op, dtype, moved):
    assert one_gpu.Case(op, 4, dtype, 100, "", None, 0, 0).moved == moved


def test_a_model_of_many_tensors():
    sizes = one_gpu.split_like_a_model(1 << 20)
    assert len(sizes) == 200 and sum(sizes) == 1 << 20 and min(sizes) >= 1
    with pytest.raises(ValueError, match="too few"):
        one_gpu.split_like_a_model(100)


WRONG = {
    "all_reduce": lambda x, group: x.clone(),
    "reduce_scatter": lambda x, group: x.tensor_split(group.world_size)[group.rank].clone(),
    "all_gather": lambda x, size, group: torch.cat([x] * group.world_size),
    "rs_adam_ag_": lambda params, grads, state, **hyper: None,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_a_failure(name, monkeypatch, tmp_path):
    cases = [c for c in one_gpu.cases(one_gpu.PLANS["emulated"]) if c.op == name.rstrip("_")]
    monkeypatch.setattr(one_gpu, "cases", lambda plan: cases[:1])
    monkeypatch.setattr(co, name, WRONG[name])
    record = tmp_path / "record.json"
    assert one_gpu.main(["--device", "emulated", "--json", str(record)]) == 1
    result = json.loads(record.read_text())
    assert result["cases"] == []
    assert "AssertionError: rank" in result["failures"][0], result["failures"]


def test_graphs_that_fail_are_left_out(monkeypatch):
    """They close the ranks, so the case begins anew without."""
    device = one_gpu.Device("emulated")
    case = one_gpu.cases(one_gpu.PLANS["emulated"])[-1]

    def no_graph(fused):
        fused.local.close()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(one_gpu, "Graph", no_graph)
    with pytest.raises(one_gpu.NoGraph, match="RuntimeError: operation not permitted"):
        one_gpu.measure(case, device, 1, "")
    result = one_gpu.measure(case, device, 1, "so it is")
    assert result.record(1.0)["no_graph"] == "so it is"
    assert set(result.seconds) == {"coconet", "torch: cat"}


# --- the ranks' threads --------------------------------------------------------------------------


def test_threads_have_the_stream_of_the_caller(monkeypatch):
    """On a CUDA device; a new thread has the default stream of device 0."""

    class Stream:
        device = torch.device("cuda", 1)

    class Here(threading.local):
        device = stream = None

    here, caller = Here(), Stream()

    def entered(name):
        @contextlib.contextmanager
        def enter(value):
            before = getattr(here, name)
            setattr(here, name, value)
            yield
            setattr(here, name, before)

        return enter

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "device", entered("device"))
    monkeypatch.setattr(torch.cuda, "stream", entered("stream"))
    with co.LocalCommunicator(2, heap_bytes=1 << 20) as local:
        assert local.run(lambda comm: (here.device, here.stream)) == [(None, None)] * 2
        local.device = torch.device("cuda", 1)
        assert local.run(lambda comm: (here.device, here.stream)) == [(Stream.device, caller)] * 2
