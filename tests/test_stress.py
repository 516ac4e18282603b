"""The stress program: a short run of it, and that it notices what it should."""

from __future__ import annotations

import os
import signal

import pytest
from harness import start_program, wait_for

from coconet_ops.testing.plan import FAULTS, make_round


def run(tmp_path, *arguments):
    """Exit code, stdout and stderr of a Python program, whose processes have all left."""
    program = start_program(arguments, tmp_path)
    stdout, stderr = program.communicate(timeout=300)
    wait_for(lambda: everyone_left(program.pid))
    return program.returncode, stdout, stderr


def everyone_left(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("ranks", [2, 4])
def test_short_run(tmp_path, ranks):
    module = "-m", "coconet_ops.testing.stress"
    limits = "--rounds", "8", "--minutes", "5"
    code, stdout, stderr = run(tmp_path, *module, "--ranks", str(ranks), "--seed", "4", *limits)
    assert code == 0, stdout + stderr
    assert "passed: 8 rounds" in stdout
    assert "Traceback" not in stderr, stderr


def test_plans_depend_on_seed_and_number_alone():
    plans = [make_round(7, number, 3) for number in range(400)]
    assert plans == [make_round(7, number, 3) for number in range(400)]
    assert plans[0] != make_round(8, 0, 3)
    assert {plan.fault.kind for plan in plans} == set(FAULTS)
    assert make_round(7, 3, 3, ("kill",)).fault.kind == "kill"
    assert make_round(7, 3, 1).fault.kind == "none", "a rank alone has no peers"


# What the parent plans or does is changed, so that the ranks see something that they must not see.
SABOTAGED = """
import dataclasses, signal, sys
from coconet_ops.testing import faults, plan, processes, stress

if __name__ == "__main__":
    processes.GRACE = 1.0
    {}
    sys.exit(stress.main(["--ranks", "3", "--seed", "1", "--rounds", "5", *sys.argv[1:]]))
"""
UNCHECKED = """
    make_round = stress.make_round
    def unchecked(*arguments):
        round = make_round(*arguments)
        fault = dataclasses.replace(round.fault, details={"about": "op"})
        return dataclasses.replace(round, check=False, fault=fault)
    stress.make_round = unchecked
"""
LEFT_STOPPED = """
    processes.WATCHDOG = 4.0
    def stop(stage):
        stage.expect(stage.members, "looping")
        stage.signal(stage.victim, signal.SIGSTOP)
    faults.FAULTS["pause"].cause = stop
"""


@pytest.mark.parametrize(
    ("sabotage", "fault", "words"),
    [
        (UNCHECKED, "disagree", ("expected MismatchError",)),
        (LEFT_STOPPED, "pause", ("don't say 'report'", "most recent call first", "in loop")),
    ],
    ids=["wrong error", "hang"],
)
def test_violation_is_reported_with_all_that_is_needed(tmp_path, sabotage, fault, words):
    script = tmp_path / "sabotaged.py"
    script.write_text(SABOTAGED.format(sabotage))
    code, stdout, stderr = run(tmp_path, str(script), "--fault", fault)
    assert code == 1, stdout + stderr
    for word in (
        *words,
        "FAILED in round 0",
        "Round(seed=1",
        "--- rank 2",
        "--seed 1 --round 0",
    ):
        assert word in stdout, f"{word!r} is missing:\n{stdout}{stderr}"


def test_interrupted_run_leaves_no_process(tmp_path):
    module = "-u", "-m", "coconet_ops.testing.stress"
    program = start_program([*module, "--ranks", "2", "--minutes", "5", "--verbose"], tmp_path)
    for line in program.stdout:
        if line.startswith("round 1"):
            break
    os.kill(program.pid, signal.SIGINT)
    _, stderr = program.communicate(timeout=300)
    assert program.returncode == 128 + signal.SIGINT, stderr
    wait_for(lambda: everyone_left(program.pid))
