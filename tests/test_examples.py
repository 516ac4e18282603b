"""examples/train_lm.py: its own launcher, torchrun, --compare, Ctrl-C."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness import start_program

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_lm.py"
MODEL = "--layers 1 --dim 32 --heads 2 --batch 2 --seq 16 --max-bytes 100000 --sample 20".split()
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
WATCHDOG = 300.0  # seconds: a hang detector, not a speed limit


@pytest.fixture
def start(tmp_path):
    """start(*arguments, launcher=[]): the example in its own process group, in tmp_path."""
    started = []

    def start(*arguments: str, launcher: list[str] = ()) -> subprocess.Popen:
        process = start_program([*launcher, str(EXAMPLE), *MODEL, *arguments], tmp_path)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def run(start):
    """Like start, but returns exit code, standard output and standard error."""

    def run(*arguments: str, launcher: list[str] = ()) -> tuple[int, str, str]:
        process = start(*arguments, launcher=launcher)
        out, err = process.communicate(timeout=WATCHDOG)
        return process.returncode, out, err

    return run


def losses(path: Path) -> dict[str, list[float]]:
    return {name: run["losses"] for name, run in json.loads(path.read_text())["runs"].items()}


def test_own_launcher_and_torchrun_train_alike(run, tmp_path):
    for name, launcher in (("own", []), ("torchrun", TORCHRUN)):
        code, out, err = run("--steps", "12", "--json", f"{name}.json", launcher=launcher)
        assert code == 0, err
        assert out.count("ranks: 2, threads per rank: 1,") == 1  # rank 0 alone prints
        assert "A sample of 20 bytes" in out
        assert launcher or err == ""
    own = losses(tmp_path / "own.json")
    assert own == losses(tmp_path / "torchrun.json")
    (curve,) = own.values()
    assert len(curve) == 12
    assert curve[-1] < curve[0]


def test_compare_draws_curves_that_coincide(run, tmp_path):
    code, out, err = run("--compare", "--steps", "20", "--json", "compare.json")
    assert code == 0, out + err
    assert (tmp_path / "train_lm.png").read_bytes().startswith(b"\x89PNG")
    curves = losses(tmp_path / "compare.json")
    assert list(curves) == ["DistributedFusedAdam", "DDP + AdamW"]
    assert curves["DistributedFusedAdam"] == pytest.approx(curves["DDP + AdamW"], abs=1e-4)
    assert "within 0.0001" in out


def test_compare_fails_beyond_the_tolerance(run, tmp_path):
    code, out, err = run("--compare", "--steps", "2", "--tolerance", "-1", "--plot", "curves.png")
    assert code == 1
    assert err == ""
    assert "BEYOND -1" in out
    assert (tmp_path / "curves.png").exists()


def test_baseline_on_text_of_ones_own(run, tmp_path):
    folder = tmp_path / "text"
    (folder / "sub").mkdir(parents=True)
    (folder / "one.txt").write_text("abc" * 100)
    (folder / "sub" / "two.txt").write_text("def" * 100)
    code, out, err = run("--baseline", "--steps", "2", "--ranks", "1", "--data", "text")
    assert code == 0, err
    assert "ranks: 1, threads per rank: 1," in out
    assert "DDP + AdamW" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "0 must be at least 1"),
        (["--dim", "33"], "--dim 33 is not a multiple of --heads 2"),
        (["--data", "nowhere"], "--data: [Errno 2] No such file or directory: 'nowhere'"),
        (["--max-bytes", "5"], "the text is shorter than one sequence of 17 bytes"),
        (["--plot", "nowhere/curves.png"], "nowhere/curves.png: no such folder"),
        (["--baseline", "--compare"], "not allowed with argument --baseline"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *MODEL, *arguments])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "target"), [("--compare", "terminal"), ("--baseline", "launcher")]
)
def test_interrupt(start, mode, target):
    process = start(mode, "--steps", "1000000")
    family = until_training(process)
    if target == "launcher":
        process.send_signal(signal.SIGINT)
    else:  # Ctrl-C reaches every process of the terminal's foreground group
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=WATCHDOG)
    assert process.returncode == 130
    assert err.strip() == "interrupted"
    assert left(family) == []


def test_interrupt_under_torchrun(start):
    process = start("--steps", "1000000", launcher=TORCHRUN)
    family = until_training(process)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=WATCHDOG)
    assert left(family) == []


def test_no_rank_outlives_a_killed_launcher(start):
    process = start("--steps", "1000000")
    family = until_training(process)
    process.kill()
    assert left(family) == []


def until_training(process: subprocess.Popen) -> list[psutil.Process]:
    """Waits for the first step and returns the process's descendants."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 1/"):
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= 2
            return family
    pytest.fail("ended before its first step:\n" + "".join(seen) + process.stderr.read())


def left(family: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run after a while."""
    deadline = time.monotonic() + WATCHDOG
    while (alive := [p for p in family if runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
