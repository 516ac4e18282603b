"""How the build finds nvcc, NCCL and architectures, and what the compile gate complains about."""

import importlib
import os
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def toolkit(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("cuda_toolkit")


@pytest.fixture
def gate(toolkit):
    return importlib.import_module("cuda_gate")


def make_nvcc(home: Path, version: str = "13.0.88", library: bool = True) -> Path:
    """A toolkit of shell scripts that answers as nvcc does."""
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    if library:
        (home / "lib" / "libcudart_static.a").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --version ]; then echo "release {version[:4]}, V{version}"; exit; fi\n'
        f'echo \'#$ LIBRARIES= "-L{home}/lib/stubs" "-L{home}/lib"\' >&2\n'
    )
    nvcc.chmod(0o755)
    return nvcc


def test_cuda_home_comes_before_path(toolkit, tmp_path):
    first, second = make_nvcc(tmp_path / "a", "13.0.88"), make_nvcc(tmp_path / "b", "12.9.1")
    path = os.pathsep.join([str(second.parent), os.environ["PATH"]])
    found = toolkit.find_toolkit({"CUDA_HOME": str(tmp_path / "a"), "PATH": path})
    assert found == toolkit.Toolkit(str(first), "13.0.88", str(tmp_path / "a" / "lib"))
    assert toolkit.find_toolkit({"PATH": path}).version == "12.9.1"


def test_cuda_home_without_nvcc_is_not_passed_over(toolkit, tmp_path):
    nvcc = make_nvcc(tmp_path / "a")
    with pytest.raises(toolkit.Unavailable, match=f"no nvcc in {tmp_path}/none/bin, where CUDA"):
        toolkit.find_toolkit({"CUDA_HOME": str(tmp_path / "none"), "PATH": str(nvcc.parent)})


def test_toolkit_without_static_runtime(toolkit, tmp_path):
    make_nvcc(tmp_path / "a", library=False)
    with pytest.raises(toolkit.Unavailable, match="no libcudart_static.a"):
        toolkit.find_toolkit({"CUDA_HOME": str(tmp_path / "a"), "PATH": os.environ["PATH"]})


def test_nvcc_that_fails(toolkit, tmp_path):
    nvcc = make_nvcc(tmp_path / "a")
    nvcc.write_text("#!/bin/sh\necho no license; exit 3\n")
    with pytest.raises(toolkit.Unavailable, match="--version` failed: no license"):
        toolkit.find_toolkit({"CUDA_HOME": str(tmp_path / "a"), "PATH": os.environ["PATH"]})


@pytest.mark.parametrize(
    "text, targets",
    [
        ("8.0;9.0a+PTX", ["sm_80", "sm_90a", "compute_90"]),
        ("8.0 9.0a", ["sm_80", "sm_90a"]),
        (" 10.0f; 12.0+PTX ", ["sm_100f", "sm_120", "compute_120"]),
        ("8.0;8.0+PTX", ["sm_80", "compute_80"]),
        ("", ["sm_80", "sm_90a", "sm_100a", "compute_90"]),
    ],
)
def test_architectures(toolkit, text, targets):
    assert toolkit.find_targets({"TORCH_CUDA_ARCH_LIST": text}) == targets


def test_architectures_that_are_none(toolkit):
    with pytest.raises(toolkit.Unavailable, match="'Hopper' is no architecture"):
        toolkit.find_targets({"TORCH_CUDA_ARCH_LIST": "8.0;Hopper"})


def test_code_and_ptx(toolkit):
    assert toolkit.gencode(["sm_90a", "compute_90"]) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_nccl(toolkit, tmp_path, monkeypatch):
    include = tmp_path / "nvidia" / "nccl" / "include"
    include.mkdir(parents=True)
    version = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n"
    (include / "nccl.h").write_text(version)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(toolkit.Unavailable, match="no nccl_device.h in the pip package"):
        toolkit.find_nccl({})
    (include / "nccl_device.h").touch()
    assert toolkit.find_nccl({}) == toolkit.Nccl(str(include), "2.28.9")
    with pytest.raises(toolkit.Unavailable, match="where NCCL_HOME points"):
        toolkit.find_nccl({"NCCL_HOME": str(tmp_path)})


# --- the gate ------------------------------------------------------------------------------------

GOOD_SASS = """
 /*0050*/ LD.E.STRONG.SYS R11, [R2.64] ;  /* 0x1 */
                                          /* 0x2 */
 /*0060*/ YIELD ;                         /* 0x3 */
 /*0080*/ CCTL.IVALL ;                    /* 0x4 */
 /*0100*/ LDG.E.128.STRONG.SYS R4, [R6.64] ;
 /*0160*/ STG.E.128.STRONG.SYS [R8.64], R4 ;
 /*0170*/ BAR.SYNC.DEFER_BLOCKING 0x0 ;
 /*0180*/ @!P0 MEMBAR.ALL.SYS ;
 /*0190*/ @!P0 ERRBAR ;
 /*01a0*/ @!P0 ST.E.STRONG.SYS [R2.64+0x4], R11 ;
"""
GOOD = {"kernel": "all_reduce_kernel", "dtype": "f32", "target": "sm_80", "stack": 0, "spills": 0}


def test_gate_passes_a_good_kernel(gate):
    assert gate.problems_of(GOOD, GOOD_SASS) == []


@pytest.mark.parametrize(
    "row, replaced, problem",
    [
        ({"stack": 48}, ("", ""), "a stack frame of 48 bytes"),
        ({"spills": 8}, ("", ""), "8 bytes of spills"),
        ({}, ("YIELD", "STL [R1], R4"), "1 accesses to local memory"),
        ({}, ("LDG.E.128.STRONG", "LDG.E.64.STRONG"), "lacks 128-bit loads from peers"),
        ({}, ("LDG.E.128.STRONG.SYS", "LDG.E.128"), "lacks 128-bit loads from peers"),
        ({}, ("STG.E.128.STRONG", "STG.E.64.STRONG"), "lacks 128-bit stores to peers"),
        ({}, ("LD.E.STRONG.SYS", "LD.E.STRONG.GPU"), "lacks an acquire at system scope"),
        ({}, ("CCTL.IVALL", "NOP"), "lacks an acquire at system scope"),
        ({}, ("MEMBAR.ALL.SYS", "MEMBAR.ALL.GPU"), "lacks a release at system scope"),
        ({}, (" ST.E.STRONG.SYS", " ST.E"), "lacks a release at system scope"),
    ],
)
def test_gate_finds(gate, row, replaced, problem):
    assert gate.problems_of(GOOD | row, GOOD_SASS.replace(*replaced)) == [problem]


def test_gate_knows_all_kernels(gate):
    rows = [
        {"kernel": kernel, "dtype": dtype, "target": target}
        for kernel, dtypes in gate.KERNELS.items()
        for dtype in dtypes or ("",)
        for target in gate.TARGETS
    ]
    assert gate.missing_or_unknown(rows, gate.KERNELS) == []
    rows.remove({"kernel": "all_reduce_kernel", "dtype": "f64", "target": "sm_90a"})
    assert gate.missing_or_unknown(rows, gate.KERNELS) == ["sm_90a has no all_reduce_kernel f64"]
    rows.append({"kernel": "all_reduce_kernel", "dtype": "u8", "target": "sm_80"})
    assert "sm_80 has all_reduce_kernel u8, which" in gate.missing_or_unknown(rows, gate.KERNELS)[0]


@pytest.mark.parametrize(
    "signature, expected",
    [
        (
            "void coconet::cuda::(anonymous namespace)::all_reduce_kernel<coconet::bf16_t>(int)",
            ("all_reduce_kernel", "bf16"),
        ),
        ("void coconet::cuda::sum<float, true>(coconet::cuda::Params)", ("sum", "f32")),
        ("coconet::cuda::(anonymous namespace)::barrier_kernel(int)", ("barrier_kernel", "")),
    ],
)
def test_gate_reads_signatures(gate, signature, expected):
    assert gate.kernel_and_dtype(signature) == expected
