"""Builds the C++ extension `coconet_ops._C`; the rest of the metadata is in pyproject.toml."""

import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import find_packages, setup

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


CPU_SOURCES = files("csrc/common", "*.cpp") + files("csrc/cpu", "**/*.cpp")
BINDING_SOURCES = files("python", "*.cpp")
HEADERS = files("csrc", "**/*.h") + files("python", "*.h")


class BuildExtension(cpp_extension.BuildExtension):
    def finalize_options(self) -> None:
        super().finalize_options()
        # One folder for every kind of install: an editable one would otherwise compile in a
        # temporary folder, from scratch each time.
        self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"

    def build_extensions(self) -> None:
        self.report()
        try:
            super().build_extensions()
        except RuntimeError as error:  # a traceback would bury the compiler's message
            sys.exit(f"coconet_ops: {error}")

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
        count = len(CPU_SOURCES), len(BINDING_SOURCES)
        lines = [
            f"coconet_ops {self.distribution.get_version()}: building coconet_ops._C",
            f"  torch     {torch.__version__} (the extension loads only on this version)",
            f"  python    {platform.python_version()}, built by {driver}",
            f"  compiler  {version}{', warnings are errors' if WERROR else ''}",
            f"  CPU       yes: csrc/cpu ({count[0]} files), python ({count[1]} files); "
            "instruction set variants are chosen at run time",
            "  CUDA      no: this version has no CUDA part",
            "  NCCL      no: this version has no NCCL part",
        ]
        print("\n".join(lines), flush=True)


WERROR = os.environ.get("COCONET_WERROR") == "1"

extension = cpp_extension.CppExtension(
    "coconet_ops._C",
    CPU_SOURCES + BINDING_SOURCES,
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
