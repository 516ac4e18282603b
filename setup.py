"""Builds the C++ extension `coconet_ops._C`; the rest of the metadata is in pyproject.toml."""

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import find_packages, setup

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))
import cuda_toolkit  # noqa: E402

# pip may be called by its path, without the environment's own ninja in PATH.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])

try:
    import torch
    from torch.utils import cpp_extension
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(
        "coconet_ops: torch is not installed in this build environment; install torch first, "
        "then run `pip install --no-build-isolation .`"
    )

if torch.__version__ < (2, 6):
    sys.exit(f"coconet_ops: torch {torch.__version__} is installed, but 2.6 or newer is needed")


def files(folder: str, pattern: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).glob(pattern))


def optional(name, find):
    """What find returns, or why it isn't used: COCONET_<name> is auto, 0 or 1."""
    choice = os.environ.get(f"COCONET_{name}", "auto")
    if choice not in ("auto", "0", "1"):
        sys.exit(f"coconet_ops: COCONET_{name}={choice}: it must be auto, 0 or 1")
    if choice == "0":
        return None, f"COCONET_{name}=0"
    try:
        return find(), ""
    except cuda_toolkit.Unavailable as error:
        if choice == "1":
            sys.exit(f"coconet_ops: COCONET_{name}=1, but {error}")
        return None, str(error)


def find_nccl() -> cuda_toolkit.Nccl:
    if not TOOLKIT:
        raise cuda_toolkit.Unavailable("there is no CUDA part")
    return cuda_toolkit.find_nccl()


# auto looks for compilers and headers, never for a GPU.
TOOLKIT, WHY_NO_CUDA = optional("CUDA", cuda_toolkit.find_toolkit)
NCCL, WHY_NO_NCCL = optional("NCCL", find_nccl)
try:
    TARGETS = cuda_toolkit.find_targets() if TOOLKIT else []
except cuda_toolkit.Unavailable as error:
    sys.exit(f"coconet_ops: {error}")
WERROR = os.environ.get("COCONET_WERROR") == "1"


def part(folder: str, stub: str, built: bool) -> list[str]:
    """Sources of a part that is in the build, or its stub."""
    if not built:
        return files(folder, stub)
    sources = files(folder, "*.cu") + files(folder, "*.cpp")
    return [source for source in sources if Path(source).name != stub]


CPU_SOURCES = files("csrc/common", "*.cpp") + files("csrc/cpu", "**/*.cpp")
CUDA_SOURCES = part("csrc/cuda", "no_cuda.cpp", bool(TOOLKIT))
NCCL_SOURCES = part("csrc/nccl", "no_nccl.cpp", bool(NCCL))
NVCC_SOURCES = (CUDA_SOURCES if TOOLKIT else []) + (NCCL_SOURCES if NCCL else [])
STUBS = ([] if TOOLKIT else CUDA_SOURCES) + ([] if NCCL else NCCL_SOURCES)
BINDING_SOURCES = files("python", "*.cpp")
HEADERS = files("csrc", "**/*.h") + files("csrc", "**/*.cuh") + files("python", "*.h")


class BuildExtension(cpp_extension.BuildExtension):
    def finalize_options(self) -> None:
        super().finalize_options()
        # One folder for every kind of install: an editable one would otherwise compile in a
        # temporary folder, from scratch each time.
        self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"

    def build_extensions(self) -> None:
        self.report()
        (extension,) = self.extensions
        if TOOLKIT:
            objects = self.compile_kernels(TOOLKIT)
            extension.extra_objects = objects
            extension.depends += objects
        extension.depends.append(self.record(extension))
        try:
            super().build_extensions()
        except RuntimeError as error:  # a traceback would bury the compiler's message
            sys.exit(f"coconet_ops: {error}")

    def record(self, extension) -> str:
        """A file that changes with what is linked: setuptools compares times only."""
        text = "\n".join([*extension.sources, *extension.extra_objects])
        path = Path(self.build_temp, "linked.txt")
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(path)

    def compile_kernels(self, toolkit: cuda_toolkit.Toolkit) -> list[str]:
        """Objects of the CUDA and NCCL parts. By nvcc alone: torch's flags and headers, which its
        own extension builder would add, cost minutes and tie the kernels to its ABI."""
        if not self.use_ninja:
            sys.exit(
                "coconet_ops: the CUDA part is built by ninja, which is missing; "
                "`pip install ninja`, or build without CUDA: COCONET_CUDA=0"
            )
        folder = Path(self.build_temp, f"nvcc-{toolkit.version}")
        folder.mkdir(parents=True, exist_ok=True)
        flags = cuda_toolkit.nvcc_flags(TARGETS, WERROR)
        if NCCL:
            flags += ["-isystem", NCCL.include]
        command = shlex.join([toolkit.nvcc, *flags]).replace("$", "$$")
        rules = [
            f"builddir = {folder}",
            "rule nvcc",
            f"  command = {command} -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = $in",
        ]
        objects = []
        for source in NVCC_SOURCES:
            objects.append(str(folder / f"{source}.o"))
            rules.append(f"build {objects[-1]}: nvcc {source}")
        plan = folder / "build.ninja"
        plan.write_text("\n".join(rules) + "\n")
        jobs = os.environ.get("MAX_JOBS")
        if subprocess.call(["ninja", "-f", str(plan), *(["-j", jobs] if jobs else [])]):
            sys.exit("coconet_ops: nvcc failed; COCONET_CUDA=0 builds without the CUDA part")
        return objects

    def report(self) -> None:
        compiler = cpp_extension.get_cxx_compiler()
        try:
            version = subprocess.check_output([compiler, "--version"], text=True).splitlines()[0]
        except OSError as error:
            sys.exit(
                f"coconet_ops: the C++ compiler `{compiler}` can't be run ({error.strerror}); "
                "install g++ (Debian: `apt install g++`) or set CXX"
            )
        driver = "ninja" if self.use_ninja else "setuptools, one file at a time (no ninja found)"
        cuda = f"no: {WHY_NO_CUDA}"
        if TOOLKIT:
            cuda = f"yes: nvcc {TOOLKIT.version} ({TOOLKIT.nvcc}) for {', '.join(TARGETS)}"
        nccl = f"no: {WHY_NO_NCCL}"
        if NCCL:
            nccl = f"yes: headers of {NCCL.version} ({NCCL.include})"
        lines = [
            f"coconet_ops {self.distribution.get_version()}: building coconet_ops._C",
            f"  torch     {torch.__version__} (the extension loads only on this version)",
            f"  python    {platform.python_version()}, built by {driver}",
            f"  compiler  {version}{', warnings are errors' if WERROR else ''}",
            "  CPU       yes: instruction set variants are chosen at run time",
            f"  CUDA      {cuda}",
            f"  NCCL      {nccl}",
        ]
        print("\n".join(lines), flush=True)


extension = cpp_extension.CppExtension(
    "coconet_ops._C",
    CPU_SOURCES + STUBS + BINDING_SOURCES,
    depends=HEADERS,
    extra_compile_args=[
        "-O3",
        "-std=c++17",
        "-fno-math-errno",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        *(["-Werror"] if WERROR else []),
        # As system headers, so that torch's own warnings stay out.
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
    ],
    extra_link_args=["-pthread"],
)
if TOOLKIT:
    # Static, so that the extension loads where there is neither CUDA nor a driver. Its symbols
    # stay inside, apart from those of the libcudart.so that torch may bring.
    extension.library_dirs += [TOOLKIT.library_dir]
    extension.libraries += ["cudart_static", "rt", "dl", "pthread"]
    extension.extra_link_args += ["-Wl,--exclude-libs,libcudart_static.a"]
extension.include_dirs = [str(Path("csrc").resolve())]

setup(
    license="MIT",  # here, since releases of setuptools disagree on its form in pyproject.toml
    packages=[
        *find_packages(include=["coconet_ops", "coconet_ops.*"]),
        "coconet_ops.bench",
        *(f"coconet_ops.bench.{name}" for name in find_packages("bench")),
    ],
    package_dir={"coconet_ops.bench": "bench"},
    package_data={"coconet_ops": ["py.typed"]},
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
)
