"""csrc/nccl without a GPU: a fake libnccl.so.2 and a fake device; see tests/nccl/README.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKES = ROOT / "tests" / "nccl"
NCCL = ROOT / "csrc" / "nccl"

sys.path.insert(0, str(ROOT / "scripts"))
import cuda_toolkit  # noqa: E402

CXX = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Icsrc"]


def build(*command: object) -> None:
    words = [str(word) for word in command]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def play(program: Path, library: Path, *arguments: object, **environment: object) -> list[str]:
    """Runs the program with the folder's libnccl.so.2; the lines that it and the fakes wrote."""
    result = subprocess.run(
        [str(word) for word in (program, *arguments)],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(library),
            **{name: str(value) for name, value in environment.items()},
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The program that loads NCCL, and the folder of a fake."""
    folder = tmp_path_factory.mktemp("library")
    sources = [FAKES / "library_driver.cpp", NCCL / "library.cpp"]
    build(*CXX, *sources, "-o", folder / "driver", "-ldl")
    build(*CXX, "-shared", "-fPIC", FAKES / "fake_library.cpp", "-o", folder / "libnccl.so.2")
    return folder / "driver", folder


BUILD_AGAIN = "; build it again with that version's headers"


@pytest.mark.parametrize(
    "built_for, version, refused",
    [
        (22809, 22809, None),
        (22809, 22808, "2.28.8, but coconet_ops was built for 2.28.9 exactly"),
        (22809, 22907, "2.29.7, but coconet_ops was built for 2.28.9 exactly"),
        (22809, 2708, "2.7.8, but coconet_ops was built for 2.28.9 exactly"),
        (23007, 23007, None),
        (23007, 23100, None),
        (23007, 23004, "2.30.4, but coconet_ops was built for 2.30.7 or newer"),
        (22900, 22901, None),
    ],
)
def test_versions(library, built_for, version, refused):
    program, folder = library
    options = {"FAKE_NCCL_VERSION": version, "FAKE_NCCL_RESULT": 0}
    (line,) = play(program, folder, built_for, "ncclGetVersion", **options)
    if refused:
        assert line == f"error: NCCL: {folder}/libnccl.so.2 is version {refused}{BUILD_AGAIN}"
    else:
        assert line.startswith("loaded 2.")


def test_version_is_not_told(library):
    program, folder = library
    options = {"FAKE_NCCL_VERSION": 22809, "FAKE_NCCL_RESULT": 3}
    (line,) = play(program, folder, 22809, "ncclGetVersion", **options)
    assert line == f"error: NCCL: ncclGetVersion of {folder}/libnccl.so.2 failed with code 3"


def test_missing_function(library):
    program, folder = library
    options = {"FAKE_NCCL_VERSION": 22809, "FAKE_NCCL_RESULT": 0}
    (line,) = play(program, folder, 22809, "ncclDevCommCreate", **options)
    expected = f"error: NCCL: {folder}/libnccl.so.2 has no function ncclDevCommCreate; "
    assert line.startswith(expected)


def test_missing_library(library, tmp_path):
    (tmp_path / "libnccl.so.2").write_text("no library")
    (line,) = play(library[0], tmp_path, 22809, "ncclGetVersion")
    assert line.startswith(f"error: NCCL: can't be loaded: {tmp_path}/libnccl.so.2: ")
    assert line.endswith("; it comes with a CUDA build of torch, or with pip's nvidia-nccl-cu13")


def test_built_without(tmp_path):
    build(*CXX, FAKES / "driver.cpp", NCCL / "no_nccl.cpp", "-o", tmp_path / "driver")
    version, line = play(tmp_path / "driver", tmp_path, 3)
    assert version == "built for "
    assert line.startswith("error: coconet_ops was built without NCCL; a build with nvcc")


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """The program that plays a rank, the folder of a fake, and the headers' version."""
    try:
        nvcc, headers = cuda_toolkit.find_nvcc(), cuda_toolkit.find_nccl()
    except cuda_toolkit.Unavailable as reason:
        pytest.skip(f"csrc/nccl can't be compiled here: {reason}")
    folder = tmp_path_factory.mktemp("peers")
    flags = [*cuda_toolkit.nvcc_flags(["sm_80"], werror=True), "-isystem", headers.include]
    sources = [FAKES / "driver.cpp", FAKES / "fake_device.cu"]
    sources += [NCCL / "nccl_peers.cu", NCCL / "library.cpp"]
    build(nvcc, *flags, *sources, "-o", folder / "driver", "-ldl")
    # The fake's functions must be seen, unlike those of a part of the extension.
    flags[flags.index(next(f for f in flags if f.startswith("-Xcompiler")))] = "-Xcompiler=-fPIC"
    build(nvcc, *flags, "-shared", FAKES / "fake_nccl.cu", "-o", folder / "libnccl.so.2")
    return folder / "driver", folder, headers.version


MADE = ["ncclMemAlloc", "ncclGetUniqueId", "ncclCommInitRank"]
MAPPED = ["ncclCommWindowRegister", "ncclDevCommCreate", "window_pointers of 0x20"]
FREED = ["ncclDevCommDestroy", "ncclCommWindowDeregister", "ncclMemFree"]


def test_a_rank(peers):
    program, folder, version = peers
    pointers = [f"pointer {0x1000 * (rank + 1):#x}" for rank in range(4)]
    lines = play(program, folder, 3)
    assert lines == [
        f"built for {version}",
        *MADE,
        *MAPPED,
        *pointers,
        "barrier of 17 on 0x7",
        *FREED,
    ]


# Where a rank fails, what it says, and what it must still free.
FAILURES = {
    "ncclMemAlloc": [],
    "ncclGetUniqueId": FREED[2:],
    "ncclCommInitRank": FREED[2:],
    "ncclCommWindowRegister": FREED[2:],
    "ncclDevCommCreate": FREED[1:],
}


@pytest.mark.parametrize("function", FAILURES)
def test_a_call_fails(peers, function):
    program, folder, _ = peers
    lines = play(program, folder, 3, FAKE_NCCL_FAIL=function)
    calls = [*MADE, *MAPPED]
    freed = FAILURES[function]
    assert lines[1:-1] == [*calls[: calls.index(function) + 1], *freed]
    where = "" if function == "ncclGetUniqueId" else " on device 3"
    why = "system error" + (" (the fake was told to)" if where else "")
    assert lines[-1] == f"error: NCCL: {function}{where} failed: {why}"


def test_some_ranks_are_out_of_reach(peers):
    program, folder, _ = peers
    lines = play(program, folder, 3, FAKE_NCCL_TEAM=2)
    assert lines[1:-1] == [*MADE, "ncclMemFree"]
    assert lines[-1].startswith(
        "error: NCCL: of 4 ranks only 2 can reach rank 1's memory by load and store; "
    )


def test_no_symmetric_windows(peers):
    program, folder, _ = peers
    lines = play(program, folder, 3, FAKE_NCCL_NO_WINDOW=1)
    assert lines[1:-1] == [*MADE, "ncclCommWindowRegister", "ncclMemFree"]
    assert lines[-1].startswith("error: NCCL: symmetric windows are not supported here; ")


def test_no_such_device(peers):
    program, folder, _ = peers
    lines = play(program, folder, 4)
    assert lines[1:] == ["error: CUDA: cudaSetDevice failed: invalid device ordinal"]


def test_another_version_at_run_time(peers):
    program, folder, version = peers
    lines = play(program, folder, 3, FAKE_NCCL_VERSION=22803)
    assert lines[1:] == [
        f"error: NCCL: {folder}/libnccl.so.2 is version 2.28.3, but coconet_ops was built for "
        f"{version} {'exactly' if version.startswith('2.28.') else 'or newer'}{BUILD_AGAIN}"
    ]
