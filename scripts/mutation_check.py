#!/usr/bin/env python3
"""Mutation check: removes each synchronization, one at a time, and shows that a test notices.

    make mutants                           # all of them; may take more than half an hour
    scripts/mutation_check.py --list       # the sites
    scripts/mutation_check.py --only staged.h --only Heap::
    scripts/mutation_check.py --sample 10  # some without a justification, others every day

A site is a place in the source text that edits() finds: a wait, a signal, a barrier, a lock, a
fence or a memory order. Its mutant lacks it, or has a relaxed order. A mutant is noticed when the
suite's tests fail, when ThreadSanitizer reports, or when a run doesn't end. One that survives all
cases in all modes needs a reason in tests/mutants.json; the check fails on survivors without a
reason and on reasons without a survivor. It works in a copy of the tree in build/mutants and writes
its results to build/mutants.json.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "mutants"
RESULTS = ROOT / "build" / "mutants.json"
REASONS = ROOT / "tests" / "mutants.json"
COPIED = ("csrc", "tests/native", "tests/emulator", "tests/cuda")

RUN_LIMIT_S = 600  # a run that takes longer hangs


@dataclass
class Suite:
    """Tests in C++ with a Makefile like that of tests/native, and the sources they answer for."""

    name: str
    folder: str
    sources: list[str]
    build: str  # the objects of a mode, from the root
    # The likeliest to notice first.
    modes: list[str] = field(default_factory=lambda: ["thread", "plain"])
    # Parts of the names of the cases to try first, by pattern of the source's path; after a |,
    # those to try next.
    first: dict[str, str] = field(default_factory=dict)
    # Objects that the first build leaves as they are, by pattern of the source's path: they don't
    # run, only test, or take long to compile where others show the same.
    spare: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    unchanged: bool = True  # the spare objects are those of the unchanged sources

    @staticmethod
    def of(table: dict[str, str], path: str) -> str:
        return next((value for key, value in table.items() if fnmatch.fnmatch(path, key)), "")


SUITES = [
    Suite(
        name="cpu",
        folder="tests/native",
        sources=["csrc/cpu/*.h", "csrc/cpu/*.cpp", "csrc/common/*.h", "csrc/common/*.cpp"],
        build="build/native/{mode}",
        first={
            "*/heap.*": "blocks_freed sequences",
            "*/all_gather.cpp": "all_gather_of_many_chunks no_counter",
            "*/rs_adam_ag.*": "rejections_between_calls no_counter",
            "*/liveness.*": "rendezvous",
            "*/rendezvous.*": "rendezvous",
            "*/communicator.*": "rejections one_rank counter ping thread barrier closing disagree",
            "*": "many_chunks rejections one_rank no_counter barriers long_wait sequences",
        },
        spare={
            "*/channel.h": "kernels_*.o test_*.o adam.o cases.o native.o",
            "*": "kernels_avx*.o test_*.o adam.o cases.o native.o",
        },
        environment={"COCONET_ISA": "portable", "COCONET_TEST_TIMEOUT": "10"},
    ),
    Suite(
        name="cuda",
        folder="tests/cuda",
        sources=["csrc/cuda/*.cuh", "csrc/cuda/*.cu", "csrc/cuda/*.cpp", "csrc/common/*.h"],
        build="build/cuda/{mode}",
        first={
            "*.cpp": "disagree one_rank heap_is_full streams questions",
            "*": "barriers_order counter_falls are_counted"
            "|disagree rejections one_rank graphs_of_many",
        },
        # They take long to compile.
        spare={
            "*/channel.cuh": "all_reduce.cu.o reduce_scatter.cu.o",
            "*/machine.cuh": "all_gather.cu.o reduce_scatter.cu.o",
            "*/reduce.cuh": "all_gather.cu.o reduce_scatter.cu.o",
            "*/staged.h": "all_gather.cu.o reduce_scatter.cu.o",
        },
        environment={"COCONET_TEST_TIMEOUT": "10", "COCONET_EMULATOR_TIMEOUT": "20"},
    ),
]

# Statements that are removed: calls of these.
REMOVED = (
    r"signal|wait\w*|settle|enter|post|leave|complete_outputs|skip_chunks|finish_chunks|check_peers"
    r"|futex_\w+|flush_streaming_stores|__builtin_ia32_sfence|notify_all|notify_one|lock|join"
    r"|__syncthreads|__syncwarp|__threadfence\w*|cp_async_\w+|barrier|abandon|order|synchronize"
)
# Conditions that are taken for true.
CONDITIONS = r"wait|wait_all|wait_inputs|reached_in_time|enter|complete_outputs|claim"
# Calls that have a weaker twin of the same arguments.
WEAKENED = {
    "store_release": "store_relaxed",
    "load_acquire": "load_relaxed",
    "__syncthreads_or": "",
    "__syncthreads_and": "",
    "__syncthreads_count": "",
}


# --- sites ---------------------------------------------------------------------------------------


@dataclass
class Site:
    suite: Suite
    path: str
    begin: int
    end: int
    replacement: str
    name: str  # file:function:ordinal:what, the same whatever lines are added elsewhere
    line: int
    text: str


def without_comments(text: str) -> str:
    """The same length; comments, literals and preprocessor lines are blank."""
    pattern = re.compile(
        r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n\\]|\\.)*"
        r'|"(?:[^"\\\n]|\\.)*"' + r"|(?<![0-9a-fA-F])'(?:[^'\\\n]|\\.)+'",
        re.DOTALL | re.MULTILINE,
    )
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def closing(text: str, at: int) -> int:
    """The index of the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    raise ValueError(f"no bracket closes the one at {at}")


def opening(text: str, at: int) -> int:
    """The index of the innermost bracket that is open at `at`; -1 if there is none."""
    depth = 0
    for i in range(at - 1, -1, -1):
        depth += (text[i] in ")]}") - (text[i] in "([{")
        if depth < 0:
            return i
    return -1


def block_name(header: str, inside_function: bool) -> tuple[str, bool]:
    """The name that a block adds to that of its sites, and whether it is a function."""
    header = re.sub(r"template\s*<[^{}()]*?>(?=\s*[\w_])", " ", header)
    header = re.sub(r"\b(alignas|__launch_bounds__|__attribute__)\s*\(+[^()]*\)+", " ", header)
    if type_name := re.search(r"\b(?:class|struct|union)\s+(\w+)[^()]*$", header):
        return type_name[1], False
    if bound_lambda := re.search(r"(\w+)\s*=\s*\[[^\]]*\]", header):
        return bound_lambda[1], True
    called = re.search(r"([\w:~]+)\s*\(", header)
    if inside_function or "[" in header.split("(")[0] or not called:
        return "", inside_function
    return called[1], True


def functions(code: str) -> list[tuple[int, int, str]]:
    """Begin, end and qualified name of every named block, outer ones first."""
    blocks, stack = [], []
    begin, parens = 0, 0  # of the statement; how deep in its parentheses
    for i, c in enumerate(code):
        if c in "()":
            parens += 1 if c == "(" else -1
        elif c == ";" and parens == 0:
            begin = i + 1
        elif c == "{":
            _, inside, outer, _ = stack[-1] if stack else (0, False, "", 0)
            name, is_function = block_name(code[begin:i], inside)
            name = "::".join(part for part in (outer, name) if part)
            stack.append((i, is_function, name, parens))
            begin, parens = i + 1, 0
        elif c == "}" and stack:
            start, _, name, parens = stack.pop()
            blocks.append((start, i, name))
            if parens == 0:
                begin = i + 1
    return sorted(blocks)


def call_begin(code: str, at: int) -> tuple[int, str]:
    """Where the call of the function named at `at` begins, with the object before it; and whether
    it is a "statement", a "condition" (negated, joined, returned), or "other"."""
    while True:
        before = re.search(r"(?:\.|->|::)\s*$", code[:at])
        if not before:
            break
        at = before.start()
        while code[at - 1] in ")]":
            at = opening(code, at - 1)
        at = re.search(r"\w*$", code[:at]).start()
    rest = code[:at].rstrip()
    if re.search(r"[;{})]$|\b(else|do)$", rest):
        return at, "statement"
    condition = re.search(r"!$|&&$|\|\|$|\breturn$|\b(if|while)\s*\($", rest)
    return at, "condition" if condition else "other"


def edits(code: str):
    """Yields begin, end, replacement and what it is for every site."""
    for m in re.finditer(r"\bmemory_order_(release|acquire|seq_cst|acq_rel)\b", code):
        called = re.search(r"\w+\s*$", code[: opening(code, m.start())])
        yield m.start(1), m.end(1), "relaxed", f"{called[0]} {m[1]}"
    for m in re.finditer(r"\b__ATOMIC_(RELEASE|ACQUIRE|SEQ_CST|ACQ_REL)\b", code):
        yield m.start(1), m.end(1), "RELAXED", m[1].lower()
    for m in re.finditer(r"(?:\.|->)(load|store|exchange|fetch_\w+)\s*(?=\()", code):
        end = closing(code, m.end())
        arguments = code[m.end() + 1 : end].strip()
        if (m[1] == "load") == (arguments == "") and "," not in arguments:
            order = "std::memory_order_relaxed" if not arguments else ", std::memory_order_relaxed"
            yield end, end, order, f"{m[1]} seq_cst"
    for m in re.finditer(rf"\b({REMOVED}|{CONDITIONS})\s*(?:<[^;<>()]*>\s*)?(?=\()", code):
        end = closing(code, m.end())
        begin, kind = call_begin(code, m.start())
        if kind == "condition" and re.fullmatch(CONDITIONS, m[1]):
            yield begin, end + 1, "true", m[1]
        elif re.search(r"\breturn\s*$", code[:begin]) or kind == "statement":
            if code[end + 1 :].lstrip().startswith(";"):
                yield begin, end + 1, "(void)0", m[1]
    for m in re.finditer(r"\b(?:const\s+)?std::(lock_guard|scoped_lock)\b[^;{}]*(?=;)", code):
        yield m.start(), m.end(), "(void)0", m[1]
    for m in re.finditer(rf"\b({'|'.join(WEAKENED)})\s*(?=\()", code):
        defined = re.search(r"(\w+)\s+$", code[: m.start()])
        if not defined or defined[1] == "return":
            yield m.start(1), m.end(1), WEAKENED[m[1]], m[1]


def find_sites(suites: list[Suite]) -> list[Site]:
    sites, seen = [], set()
    for suite in suites:
        paths = sorted({p for glob in suite.sources for p in ROOT.glob(glob)})
        for path in paths:
            text = path.read_text()
            code = without_comments(text)
            blocks = functions(code)
            count: dict[str, int] = {}
            relative = str(path.relative_to(ROOT))
            for begin, end, replacement, what in sorted(edits(code)):
                around = [name for first, last, name in blocks if first <= begin <= last]
                where = f"{relative}:{around[-1] if around else ''}"
                key = f"{where}:{what}"
                count[key] = count.get(key, 0) + 1
                name = f"{where}:{count[key]}:{what}"
                if name in seen:  # by another suite
                    name += f":{suite.name}"
                seen.add(name)
                line = text.count("\n", 0, begin) + 1
                shown = text.splitlines()[line - 1].strip()
                sites.append(Site(suite, relative, begin, end, replacement, name, line, shown))
    return sites


# --- running -------------------------------------------------------------------------------------


@dataclass
class Outcome:
    kind: str  # "passed", "failed", "ThreadSanitizer", "hang", "crash", "doesn't compile"
    mode: str = ""
    case: str = ""
    detail: str = ""

    @property
    def noticed(self) -> bool:
        return self.kind not in ("passed", "doesn't compile")


def copy_tree() -> None:
    """Files that are the same keep their times, so make rebuilds nothing for them."""
    kept = set()
    for folder in COPIED:
        for source in (ROOT / folder).rglob("*"):
            if not source.is_file():
                continue
            target = TREE / source.relative_to(ROOT)
            kept.add(target)
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    for folder in COPIED:
        for target in (TREE / folder).rglob("*"):
            if target.is_file() and target not in kept:
                target.unlink()


def make(suite: Suite, mode: str, target: str, args: str, spare: str) -> tuple[int | None, str]:
    """Exit status, None when it took too long, and the output. Ends at the first failed case."""
    command = ["make", "-s", "-C", str(TREE / suite.folder), target, f"MODE={mode}"]
    objects = TREE / suite.build.format(mode=mode)
    for pattern in spare.split():
        for path in objects.glob(pattern):
            command += ["-o", str(path)]
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "COCONET_WERROR")}
    process = subprocess.Popen(
        [*command, f"ARGS={args}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env=environment | suite.environment,
    )

    def end(*_):
        os.killpg(process.pid, signal.SIGKILL)

    late = []
    signal.signal(signal.SIGALRM, lambda *_: (late.append(True), end()))
    signal.alarm(RUN_LIMIT_S)
    output = ""
    try:
        for line in process.stdout:
            output += line
            if target == "run" and re.match(r"\w+ FAILED", line):
                output += process.stdout.readline()
                end()
                break
        status = process.wait()
    except BaseException:
        end()
        raise
    finally:
        signal.alarm(0)
    return None if late else status, output


def run(suite: Suite, mode: str, cases: str, spare: str = "") -> Outcome:
    status, output = make(suite, mode, "build", "", spare)
    if status != 0:
        errors = [line for line in output.splitlines() if "error" in line] or ["took too long"]
        return Outcome("doesn't compile", mode, "", errors[0])
    status, output = make(suite, mode, "run", cases, spare)
    names = re.findall(r"^(\w+) (?=passed|FAILED|=====|\w+:|$)", output, re.MULTILINE)
    case = names[-1] if names else ""
    if "ThreadSanitizer" in output:
        summary = re.search(r"SUMMARY: ThreadSanitizer: (.*)", output)
        where = re.sub(r"\S*/", "", summary[1]) if summary else ""
        return Outcome("ThreadSanitizer", mode, case, where)
    if failure := re.search(r"^\w+ FAILED.*(?:\n.*)?", output, re.MULTILINE):
        text = re.sub(r"\s+", " ", failure[0])
        return Outcome("failed", mode, case, text.partition("FAILED ")[2][:300])
    if status is None:
        return Outcome("hang", mode, case, f"no end after {RUN_LIMIT_S} s")
    if status != 0:
        return Outcome("crash", mode, case, output[-300:])
    return Outcome("passed", mode)


def try_mutant(site: Site) -> Outcome:
    """The first cases of the file; then, of everything rebuilt, all cases in every mode."""
    suite, path = site.suite, TREE / site.path
    if not suite.unchanged:
        make(suite, suite.modes[0], "build", "", "")
        suite.unchanged = True
    original = path.read_text()
    path.write_text(original[: site.begin] + site.replacement + original[site.end :])
    try:
        firsts, spare = suite.of(suite.first, site.path), suite.of(suite.spare, site.path)
        for cases in firsts.split("|"):
            outcome = run(suite, suite.modes[0], cases, spare)
            if outcome.kind != "passed":
                break
        for mode in suite.modes:
            if outcome.kind == "passed":
                suite.unchanged = False
                outcome = run(suite, mode, "")
        return outcome
    finally:
        path.write_text(original)


def baseline(sites: list[Site], whole: bool) -> None:
    """Unchanged, everything passes."""
    for suite in {id(s.suite): s.suite for s in sites}.values():
        firsts = " ".join({suite.of(suite.first, s.path) for s in sites if s.suite is suite})
        firsts = firsts.replace("|", " ")
        for mode in suite.modes if whole else suite.modes[:1]:
            begin = time.monotonic()
            outcome = run(suite, mode, "" if whole else firsts)
            print(f"unchanged, {suite.name}, {mode}: {outcome.kind} "
                  f"({time.monotonic() - begin:.0f} s)", flush=True)  # fmt: skip
            if outcome.kind != "passed":
                sys.exit(f"the check needs tests that pass: {outcome.case} {outcome.detail}")


# --- report --------------------------------------------------------------------------------------


def load_reasons() -> dict[str, str]:
    groups = json.loads(REASONS.read_text()) if REASONS.exists() else []
    return {site: group["reason"] for group in groups for site in group["sites"]}


def summary(results: list[tuple[Site, Outcome]]) -> str:
    counts: dict[tuple[str, str], int] = {}
    files: dict[str, list[int]] = {}
    for site, outcome in results:
        by = f"{outcome.kind} ({outcome.mode})" if outcome.noticed else outcome.kind
        row = files.setdefault(site.path, [0, 0])
        row[not outcome.noticed] += 1
        counts[site.suite.name, by] = counts.get((site.suite.name, by), 0) + 1
    lines = [f"{'file':40} noticed  survived"]
    lines += [f"{path:40} {n:7}  {s:8}" for path, (n, s) in sorted(files.items())]
    lines += [""] + [f"{suite}: {by}: {n}" for (suite, by), n in sorted(counts.items())]
    return "\n".join(lines)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the tests that run, too
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the sites and end")
    parser.add_argument("--only", action="append", default=[], help="sites with this in their name")
    parser.add_argument("--suite", choices=[s.name for s in SUITES], help="one suite")
    parser.add_argument("--sample", type=int, help="this many, without justified ones")
    parser.add_argument("--seed", help="of the sample; without it, the date", default="")
    options = parser.parse_args()

    sites, reasons = find_sites(SUITES), load_reasons()
    unknown = sorted(reasons.keys() - {s.name for s in sites})
    sites = [s for s in sites if options.suite in (None, s.suite.name)]
    if options.only:
        sites = [s for s in sites if any(part in s.name for part in options.only)]
    if options.sample is not None:
        drawn = random.Random(options.seed or str(datetime.date.today()))
        sites = [s for s in sites if s.name not in reasons]
        sites = drawn.sample(sites, min(options.sample, len(sites)))
        sites.sort(key=lambda s: (s.path, s.begin))
    if options.list:
        for s in sites:
            print(f"{s.name}\n    {s.line}: {s.text}" + ("  [justified]" * (s.name in reasons)))
        print(f"{len(sites)} sites")
        return 0

    copy_tree()
    whole = not options.only and options.sample is None
    baseline(sites, whole)
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() and not whole else {}
    results, problems = [], []
    for number, site in enumerate(sites, 1):
        begin = time.monotonic()
        outcome = try_mutant(site)
        results.append((site, outcome))
        seen = f"{outcome.kind} in {outcome.mode} {outcome.case}" if outcome.noticed else "SURVIVED"
        justified = site.name in reasons
        if outcome.kind == "doesn't compile":
            seen = outcome.kind
            problems.append(f"doesn't compile: {site.name}: {outcome.detail}")
        elif not outcome.noticed and not justified:
            problems.append(f"survives, and no reason is given: {site.name} (line {site.line})")
        elif outcome.noticed and justified:
            problems.append(f"is noticed, so needs no reason: {site.name}")
        elif not outcome.noticed:
            seen = "survived, as justified"
        print(f"[{number}/{len(sites)}] {site.name}: {seen} ({time.monotonic() - begin:.0f} s)",
              flush=True)  # fmt: skip
        recorded[site.name] = {"text": site.text, "reason": reasons.get(site.name)} | vars(outcome)
        RESULTS.write_text(json.dumps(recorded, indent=1))
    problems += [f"a reason is given for no site: {name}" for name in unknown]

    noticed = sum(o.noticed for _, o in results)
    print(f"\n{summary(results)}\n")
    print(f"== mutants: {noticed} of {len(results)} noticed, {len(problems)} problems ==")
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
