"""The benchmark: its arithmetic, its check, and its command line from start to Ctrl-C."""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from harness import communicator, start_program
from rich.console import Console

from coconet_ops.bench import __main__ as command
from coconet_ops.bench import cases, launch, peers, report
from coconet_ops.bench.check import PERIOD, check, fill, first_error, tile
from coconet_ops.bench.limits import placement
from coconet_ops.bench.model import BenchError, Candidate, Expected, Problem
from coconet_ops.bench.report import Row
from coconet_ops.bench.timing import Interval, Samples, best_of_peers, median_interval
from coconet_ops.bench.units import format_size, format_time, parse_size

QUICK = ["-n", "2", "-w", "1", "--repetitions", "2"]


# --- units ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4K", 4096),
        ("16m", 16 << 20),
        ("1G", 1 << 30),
        ("1.5K", 1536),
        ("8MB", 8 << 20),
    ],
)
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-4K", "4T", "0.3", "K", "nan", "inf", "4 apples"])
def test_parse_size_rejects(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        parse_size(text)


def test_format():
    assert [format_size(n) for n in (12, 4096, 16 << 20, 3 << 30)] == ["12", "4K", "16M", "3G"]
    assert [format_time(t) for t in (2e-6, 1.5e-3, 2)] == ["2 µs", "1.5 ms", "2 s"]


# --- statistics ----------------------------------------------------------------------------------


def test_median_interval_on_known_data():
    interval = median_interval([9, 1, 8, 2, 7, 3, 6, 4, 5])
    assert (interval.low, interval.median, interval.high) == (2, 5, 8)
    assert median_interval([3.0]).low == median_interval([3.0]).high == 3.0


def test_median_interval_covers_the_true_median():
    generator = random.Random(0)
    covered = 0
    for _ in range(1000):
        interval = median_interval([generator.expovariate(1) for _ in range(20)])
        covered += interval.low <= 0.6931 <= interval.high
    assert covered >= 945


def test_ratio_is_of_pairs():
    """The machine became three times slower half-way: the ratio doesn't care."""
    fast = [1.0] * 6 + [3.0] * 6
    samples = Samples(seconds={"fast": fast, "slow": [2 * t for t in fast]})
    ratio = samples.ratio("slow", "fast")
    assert (ratio.low, ratio.median, ratio.high) == (2, 2, 2)
    assert ratio.narrower_than(0.01)


def test_baseline_is_the_best_of_each_peer():
    names = {"own": "", "a slow": "a", "a fast": "a", "b": "b"}
    candidates = [Candidate(name, None, None, None, peer=peer) for name, peer in names.items()]
    samples = Samples(seconds={"own": [1], "a slow": [5], "a fast": [3], "b": [9]})
    assert best_of_peers(candidates, samples) == {"a": "a fast", "b": "b"}


def row(candidate, peer="", size=1 << 20, **changes):
    baseline = bool(peer)
    facts = {"op": "rs_adam_ag", "dtype": "float32", "layout": "bert", "unit": "parameters"}
    times = {"calls_per_sample": 1, "seconds": [0.1], "first_call": [0.123], "ping_ns": [400.0]}
    return Row(
        **facts,
        **times,
        count=size,
        bytes=4 * size,
        world=2,
        candidate=candidate,
        peer=peer,
        baseline=baseline,
        moved_bytes=18 * size,
        bus_factor=1.0,
        **{"speedup": {}, "best_peer": ""} | changes,
    )


def test_speedup_over_best_peer():
    a, b = Interval(1, 2, 3), Interval(4, 5, 6)
    assert row("own", speedup={"a": a, "b": b}, best_peer="b").speedup_over_best == b
    assert row("x", "b", best_peer="a").speedup_over_best is None
    assert row("own").speedup_over_best is None


def test_tables_fit(monkeypatch):
    """Whatever is installed, nothing is cut off at 120 columns."""
    names = list(peers.find())
    ratio = Interval(0.9876, 9.8765, 12.345)
    own = row("coconet + grad copy", speedup=dict.fromkeys(names, ratio), best_peer=names[-1])
    longest = "deepspeed + CPUAdam slice, openmpi AG"
    rows = [own, *(row(longest, name, best_peer=names[-1]) for name in names)]
    console = Console(file=io.StringIO(), width=120)
    console.print(report._table(rows, SimpleNamespace(moved=16.0)))
    console.print(report._peer_table(rows))
    text = console.file.getvalue()
    assert "9.88x [0.99-12.3]" in text
    assert text.count("baseline") == 1
    assert text.count(longest) == len(names)
    assert "…" not in text


def test_placement():
    assert placement([120, 130]) == "near"
    assert placement([400, 420]) == "far"
    assert placement([120, 400]) == "50% near"
    assert placement([0, 0]) == ""


# --- bandwidths and floors -----------------------------------------------------------------------


def problem_of(op, world, count=1 << 20, dtype=torch.float32, rank=0, layout="flat"):
    return Problem(op, dtype, layout, count, SimpleNamespace(world_size=world, rank=rank))


@pytest.mark.parametrize(
    ("op", "world", "bus"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("reduce_scatter", 4, 0.75),
        ("all_gather", 2, 0.5),
        ("rs_adam_ag", 4, 1.5),
    ],
)
def test_bandwidths(op, world, bus):
    case = cases.find()[op]
    row = Row(
        op=op,
        dtype="float32",
        layout="flat",
        unit="bytes",
        count=250_000_000,
        bytes=1_000_000_000,
        world=world,
        candidate="x",
        peer="",
        baseline=False,
        calls_per_sample=1,
        seconds=[0.5],
        first_call=[0.5],
        ping_ns=[0.0],
        moved_bytes=0,
        bus_factor=case.bus_factor(world),
        speedup={},
        best_peer="",
    )
    assert row.algbw == pytest.approx(2.0)
    assert row.busbw == pytest.approx(2.0 * bus)


@pytest.mark.parametrize(
    ("op", "world", "dtype", "per_element"),
    [
        ("all_reduce", 1, torch.float32, 0),
        ("all_reduce", 2, torch.float32, 8),
        ("all_reduce", 4, torch.bfloat16, 4),
        ("reduce_scatter", 2, torch.float32, 6),
        ("all_gather", 2, torch.float16, 4),
        ("rs_adam_ag", 1, torch.float32, 28),
        ("rs_adam_ag", 2, torch.float32, 18),
        ("rs_adam_ag", 2, torch.bfloat16, 16),
    ],
)
def test_floor(op, world, dtype, per_element):
    problem = problem_of(op, world, count=1000, dtype=dtype)
    assert cases.find()[op].moved_bytes(problem) == 1000 * per_element


@pytest.mark.parametrize("count", [200, 12345, 1 << 20])
def test_bert_layout(count):
    from coconet_ops.bench.cases.rs_adam_ag import layout_counts

    counts = layout_counts(problem_of("rs_adam_ag", 2, count=count, layout="bert"))
    assert len(counts) == 200
    assert sum(counts) == count
    assert min(counts) >= 1


def test_every_op_has_a_baseline():
    assert set(peers.find()["gloo"].factories) == set(cases.find())


# --- the check -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 5, PERIOD - 1, 10 * PERIOD + 3])
def test_fill_and_compare_agree(start):
    values = tile(0, torch.float32)
    sizes = [1, PERIOD, 70 * PERIOD + 11, 3]
    pieces = [torch.empty(n) for n in sizes]
    fill(pieces, values, start)
    indices = (torch.arange(sum(sizes)) + start) % PERIOD
    assert torch.equal(torch.cat(pieces), values[indices])

    exact = Expected(values.double(), torch.zeros(PERIOD, dtype=torch.float64), start)
    assert first_error(pieces, exact) is None
    pieces[2][-1] += 1
    assert f"element {sum(sizes[:3]) - 1} " in first_error(pieces, exact)
    pieces[1][7] = float("nan")
    assert "element 8 is nan" in first_error(pieces, exact)


def check_in_ranks(broken_rank, error, leeway=1.0):
    import torch.distributed as dist

    problem = problem_of("all_reduce", dist.get_world_size(), 1000, rank=dist.get_rank())
    x = torch.empty(1000)

    def run():
        dist.all_reduce(x)
        if problem.rank == broken_rank:
            x[123] += error

    candidate = Candidate(
        "maybe broken",
        lambda: fill([x], tile(problem.rank, x.dtype)),
        run,
        lambda: [x],
        leeway=leeway,
    )
    try:
        check(problem, candidate, cases.find()["all_reduce"].expected(problem), calls=1)
    except BenchError as complaint:
        return str(complaint)
    return None


def test_check_catches_a_wrong_candidate(run_few):
    assert set(run_few(check_in_ranks, None, 0.0)) == {None}
    for answer in run_few(check_in_ranks, 1, 1e-4):
        assert "wrong answer from 'maybe broken'" in answer
        assert "on rank 1: element 123 is" in answer
    assert set(run_few(check_in_ranks, 1, 1e-4, 1e4)) == {None}


# --- samples -------------------------------------------------------------------------------------


def test_sample_repeats_outside_python():
    done = []
    candidate = Candidate(
        "x",
        load=lambda: done.append("load"),
        run=lambda: done.append("run"),
        result=None,
        repeat=done.append,
    )
    first, total = candidate.sample(lambda: done.append("barrier"), 5)
    assert done == ["load", "barrier", 1, 4]
    assert 0 <= first <= total

    done.clear()
    replace(candidate, repeat=None).sample(lambda: done.append("barrier"), 3)
    assert done == ["load", "barrier", "run", "run", "run"]


def repeated_all_reduce(calls, heap):
    comm = communicator()
    x = comm.empty(1000) if heap else torch.empty(1000)
    x.fill_(comm.rank + 1.0)
    comm._core.repeat_all_reduce_(x, calls)
    return comm.world_size, x.unique().tolist()


@pytest.mark.parametrize("heap", [False, True])
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_repeated_all_reduce(run_few, calls, heap):
    for rank, (world, values) in enumerate(run_few(repeated_all_reduce, calls, heap)):
        total = world * (world + 1) // 2
        assert values == [total * world ** (calls - 1) if calls else rank + 1.0]


# --- the command ---------------------------------------------------------------------------------


def start(arguments, folder, program=("-m", "coconet_ops.bench")):
    return start_program([*program, *arguments], folder)


def finish(process):
    out, err = process.communicate()
    return process.returncode, out, err


def ranks_of(process):
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def await_row(process):
    """Until the first row is measured: the ranks are in full swing."""
    for line in process.stdout:
        if line.startswith("all_reduce"):
            return
    pytest.fail(f"no row: {finish(process)}")


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def test_whole_run(tmp_path):
    options = ["-b", "1000", "-e", "4000", "--dtype", "float32,bfloat16,float16", *QUICK]
    code, out, err = finish(start(["all", *options], tmp_path))
    assert code == 0, err
    for op in cases.find():
        assert f"{op} bfloat16, 2 ranks" in out
    assert "copy limit:" in out

    record = json.loads(Path(tmp_path, "bench-results/all.json").read_text())
    assert record["copy_limit"]["moved_gbps"] == 2 * record["copy_limit"]["copied_gbps"] > 0
    rows = record["rows"]
    assert {(row["op"], row["dtype"]) for row in rows} == {
        (op, dtype) for op in cases.find() for dtype in ("float32", "bfloat16", "float16")
    }
    for row in rows:
        assert len(row["seconds"]) == 2
        assert row["time"]["low"] <= row["time"]["median"] <= row["time"]["high"]
        assert set(row["speedup"]) == (set() if row["peer"] else {"gloo"})
    assert Path(tmp_path, "bench-results/all.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_world_sizes(tmp_path, ranks):
    arguments = ["all", "--ranks", str(ranks), "-b", "1000", *QUICK]
    code, _, err = finish(start(arguments, tmp_path))
    assert code == 0, err


def test_under_torchrun(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["reduce_scatter", "-b", "4K", *QUICK, "--json", "r.json", "--plot", "r.png"]
    process = start(arguments, tmp_path, (*torchrun, "-m", "coconet_ops.bench"))
    code, out, err = finish(process)
    assert code == 0, err
    assert out.count("reduce_scatter float32, 2 ranks") == 1  # only rank 0 speaks
    assert json.loads(Path(tmp_path, "r.json").read_text())["world_size"] == 2
    assert Path(tmp_path, "r.png").exists()


def test_wrong_answer_ends_the_run(tmp_path):
    # spawned ranks import the script too, so the broken op reaches them
    Path(tmp_path, "broken.py").write_text(
        "import sys\n"
        "import coconet_ops as co\n"
        "from coconet_ops.bench.__main__ import main\n"
        "co.all_reduce_ = lambda x, group: x.add_(1)\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["all_reduce", "-b", "4K", *QUICK]
    code, out, err = finish(start(arguments, tmp_path, ["broken.py"]))
    assert code == 1
    assert "coconet-bench: all_reduce: wrong answer from 'coconet private'" in err
    assert "Traceback" not in err
    assert "µs" not in out
    assert not list(Path(tmp_path, "bench-results").iterdir())


def test_interrupt_leaves_nothing(tmp_path):
    process = start(["all_reduce", "-b", "4K", "-e", "256M", "--no-check"], tmp_path)
    await_row(process)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    code, _, err = finish(process)
    assert code == 130
    assert err.strip() == "interrupted"
    assert_gone(ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_die_with_the_command(tmp_path, number):
    process = start(["all_reduce", "-b", "4K", "-e", "256M", "--no-check"], tmp_path)
    await_row(process)
    ranks = ranks_of(process)
    process.send_signal(number)
    assert_gone(ranks)
    finish(process)


def test_lost_rank_is_an_error(tmp_path):
    process = start(["all_reduce", "-b", "4K", "-e", "256M", "--no-check"], tmp_path)
    await_row(process)
    ranks = ranks_of(process)
    ranks[1].kill()
    code, _, err = finish(process)
    assert code == 1
    assert "coconet-bench: rank" in err
    assert_gone(ranks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_op"], "invalid choice"),
        (["all", "-b", "1M", "-e", "1K"], "is larger than"),
        (["all", "-b", "big"], "is no size"),
        (["all", "--dtype", "float32,int8"], "'int8' is not one of"),
        (["all", "--vs", "nobody"], "'nobody' is not one of"),
        (["all", "--ranks", "0"], "whole number from 1"),
        (["all", "-f", "1"], "whole number from 2"),
        (["all", "--json", "/proc/nothing/here.json"], "can't write"),
    ],
)
def test_bad_arguments(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        command.main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_packages(monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.main(["all"]) == 1
    assert "pip install coconet_ops[bench]" in capsys.readouterr().err


def test_peer_that_cannot_run(monkeypatch, capsys):
    absent = peers.Peer("absent", lambda: "it is not installed", {})
    monkeypatch.setattr(peers, "find", lambda: {"absent": absent})
    with pytest.raises(SystemExit):
        command.main(["all", "--vs", "absent"])
    assert "--vs absent: it is not installed" in capsys.readouterr().err


# --- peers ---------------------------------------------------------------------------------------


def test_all_leaves_out_what_is_missing(monkeypatch, capsys, tmp_path):
    absent = peers.Peer("absent", lambda: "it is not installed", {})
    gloo = peers.find()["gloo"]
    monkeypatch.setattr(peers, "find", lambda: {"absent": absent, "gloo": gloo})
    chosen = []
    monkeypatch.setattr(launch, "launch", lambda body, settings, ranks: chosen.append(settings))
    monkeypatch.chdir(tmp_path)
    command.main(["all_reduce", "--vs", "all"])
    assert chosen[0].peers == ("gloo",)
    assert "without absent: it is not installed" in capsys.readouterr().out


def test_peers_that_are_not_installed(tmp_path):
    program = (
        "import json, sys\n"
        "sys.prefix = sys.argv[1]\n"
        "from coconet_ops.bench import peers\n"
        "print(json.dumps({name: peer.missing() for name, peer in peers.find().items()}))\n"
    )
    code, out, err = finish(start([str(tmp_path)], tmp_path, ["-c", program]))
    assert code == 0, err
    reasons = json.loads(out)
    for name in ("deepspeed", "impi", "mpich", "openmpi"):
        assert "make bench-peers" in reasons.pop(name)
    assert reasons == {"ddp": None, "gloo": None, "zero": None}


def test_peers_of_torch(tmp_path):
    arguments = ["rs_adam_ag", "-b", "4K", "--dtype", "float32,bfloat16", "--vs", "ddp,gloo,zero"]
    code, out, err = finish(start([*arguments, *QUICK], tmp_path))
    assert code == 0, err
    assert "rs_adam_ag bfloat16 4K flat: without zero, which can't do this dtype" in out
    record = json.loads(Path(tmp_path, "bench-results/rs_adam_ag.json").read_text())
    for row in record["rows"]:
        if not row["peer"]:
            fp32 = row["dtype"] == "float32"
            assert set(row["speedup"]) == ({"ddp", "gloo", "zero"} if fp32 else {"gloo"})
            assert row["speedup_over_best"] == row["speedup"][row["best_peer"]]


def test_peers_that_are_installed(tmp_path):
    names = [name for name in ("deepspeed", "impi", "mpich", "openmpi") if not missing(name)]
    if not names:
        pytest.skip("no peer beyond torch is installed (make bench-peers)")
    code, _, err = finish(start(["all", "-b", "4K", "--vs", ",".join(names), *QUICK], tmp_path))
    assert code == 0, err
    record = json.loads(Path(tmp_path, "bench-results/all.json").read_text())
    assert {row["peer"] for row in record["rows"]} == {"", *names}


def missing(name):
    return peers.find()[name].missing()


# A peer with processes of its own, its mpiexec (launch), and the command, in one file: spawned
# ranks import it too. It knows the answer, adds OFFSET, and raises where that is None.
SIDECAR_PROGRAM = """
import multiprocessing, os, sys, time
from coconet_ops.bench import peers, sidecar
from coconet_ops.bench.__main__ import main
from coconet_ops.bench.check import fill, tile
from coconet_ops.bench.model import Candidate

class Library:
    def launcher(self, ranks, oversubscribed):
        return [sys.executable, __file__, "launch"], {"RANKS": str(ranks)}
    def start(self):
        pass
    def barrier(self):
        self.meeting.wait()
    def finish(self):
        pass

def all_reduce(problem, buffers):
    (x,) = buffers.private("x", [problem.count], problem.dtype)
    own = tile(problem.rank, problem.dtype)
    answer = sum(tile(rank, problem.dtype) for rank in range(problem.world))
    return [Candidate("apart", lambda: fill([x], own), lambda: fill([x], answer + OFFSET),
                      lambda: list(x.chunk(2)))]

LIBRARY = Library()
PEER = peers.Peer("apart", lambda: None, {"all_reduce": all_reduce}, LIBRARY)
peers.find = lambda: {"apart": PEER}

def launch(arguments):
    LIBRARY.world_size = int(os.environ["RANKS"])
    LIBRARY.meeting = multiprocessing.Barrier(LIBRARY.world_size)
    children = []
    for LIBRARY.rank in range(LIBRARY.world_size):
        child = os.fork()
        if child == 0:
            sidecar.main(*arguments)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)

if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(sys.argv[5:])  # after the command, the name of the module
    else:
        sys.exit(main(sys.argv[1:]))
"""


def start_with_sidecar(folder, offset, *arguments):
    Path(folder, "apart.py").write_text(SIDECAR_PROGRAM.replace("OFFSET", offset))
    return start(["all_reduce", "--vs", "apart", *arguments], folder, ["apart.py"])


def test_sidecar(tmp_path):
    code, out, err = finish(start_with_sidecar(tmp_path, "0", "-b", "4K", "-e", "64K", *QUICK))
    assert code == 0, err
    record = json.loads(Path(tmp_path, "bench-results/all_reduce.json").read_text())
    rows = [row for row in record["rows"] if row["peer"]]
    assert [row["candidate"] for row in rows] == ["apart"] * 3
    assert all(0 < first for row in rows for first in row["first_call"])
    assert "vs apart" in out


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        ("1", "all_reduce: wrong answer from 'apart'"),
        ("None", "apart: its process failed: Traceback"),
    ],
)
def test_sidecar_that_fails(tmp_path, offset, message):
    process = start_with_sidecar(tmp_path, offset, "-b", "4K", *QUICK)
    code, _, err = finish(process)
    assert code == 1
    assert f"coconet-bench: {message}" in err


def test_sidecar_dies_with_the_command(tmp_path):
    """Even deep in a call."""
    deep = "(open('deep', 'w').close() or time.sleep(3600))"
    process = start_with_sidecar(tmp_path, deep, "-b", "4K")
    while not Path(tmp_path, "deep").exists():
        assert process.poll() is None, finish(process)
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    apart = [child for child in children if "launch" in child.cmdline()]
    assert len(apart) == 3  # the launcher and one for each rank
    process.kill()
    assert_gone(apart)
    finish(process)
