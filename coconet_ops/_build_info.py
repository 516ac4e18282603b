"""What this build is, and what works on this machine."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from . import _C


def build_info() -> dict[str, Any]:
    """What this build is and what works on this machine. Starts nothing on a device.

    Returns:
        A dictionary of plain values:

        - ``version``, ``torch``: of this package, and of the torch it runs on.
        - ``compiler``: the C++ compiler's version.
        - ``isa``: the instruction set in use: ``"avx512"``, ``"avx2"`` or ``"portable"``.
        - ``cuda``: ``built``; ``why`` it isn't, else ``""``; ``nvcc``, the toolkit's version, and
          ``architectures``, nvcc's names of those with code of their own (``"sm_90a"``) or with
          PTX for newer ones (``"compute_90"``); ``""`` and empty if it isn't built.
        - ``nccl``: ``built``, ``why`` it isn't, and ``version`` of its headers, or ``""``.
        - ``devices``: the CUDA devices: ``index``, ``name``, ``capability`` such as ``"9.0"``,
          ``multiprocessors``, ``memory`` in bytes; ``no_devices``: why there are none, else ``""``.
        - ``backends``: names of the backends that work here, as in ``Communicator.backend``;
          ``unavailable``: why not, by name, for the others. ``"local"`` works on CUDA devices too,
          unless ``"local on CUDA"`` is among the latter.
    """
    from . import __version__

    cuda, devices, no_devices = _cuda()
    nccl = _C.nccl_version
    no_cuda = _no_cuda(cuda, devices, no_devices)
    problems = {
        "shm": _no_shared_memory(),
        "local": "",
        "cuda_peer": no_cuda or _no_symmetric_memory(),
    }
    backends = tuple(name for name, problem in problems.items() if not problem)
    problems["local on CUDA"] = no_cuda
    return {
        "version": __version__,
        "torch": torch.__version__,
        "compiler": _C.compiler,
        "isa": _C.isa,
        "cuda": cuda,
        "nccl": {
            "built": bool(nccl),
            "why": "" if nccl else "built without NCCL's headers or without CUDA",
            "version": nccl,
        },
        "devices": devices,
        "no_devices": no_devices,
        "backends": backends,
        "unavailable": {name: problem for name, problem in problems.items() if problem},
    }


def _cuda() -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """The CUDA part of the build, the devices, and why there are none."""
    backend = _C.cuda_backend()
    count, why = backend.device_count()
    built = bool(backend.version)
    cuda = {
        "built": built,
        "why": "" if built else why,
        "nvcc": backend.version,
        "architectures": backend.targets.split(",") if backend.targets else [],
    }
    devices = []
    for index in range(count):
        info = backend.device_info(index)
        major, minor = info.pop("compute_capability")
        devices.append({"index": index, "capability": f"{major}.{minor}", **info})
    return cuda, devices, "" if devices else why


def _no_shared_memory() -> str:
    try:
        _C.Rendezvous(1 << 20)
    except (OSError, RuntimeError) as error:
        return f"no shared memory: {error}"
    return ""


def _no_cuda(cuda: dict[str, Any], devices: list[Any], no_devices: str) -> str:
    if not cuda["built"]:
        return cuda["why"]
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) has no CUDA"
    return "" if devices else no_devices


def _no_symmetric_memory() -> str:
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return f"this torch has no symmetric memory: {error}"
    return ""


def report(info: dict[str, Any]) -> str:
    """build_info() as text, a line for each thing."""
    cuda, nccl = info["cuda"], info["nccl"]
    lines = [
        ("coconet_ops", info["version"]),
        ("torch", info["torch"]),
        ("compiler", info["compiler"]),
        ("instructions", info["isa"]),
        (
            "CUDA",
            f"nvcc {cuda['nvcc']}: {', '.join(cuda['architectures'])}"
            if cuda["built"]
            else f"no: {cuda['why']}",
        ),
        ("NCCL", f"headers of {nccl['version']}" if nccl["built"] else f"no: {nccl['why']}"),
    ]
    for device in info["devices"]:
        memory = device["memory"] / 2**30
        lines.append(
            (
                f"cuda:{device['index']}",
                f"{device['name']}, {device['capability']}, "
                f"{device['multiprocessors']} multiprocessors, {memory:.1f} GiB",
            )
        )
    if not info["devices"]:
        lines.append(("devices", f"none: {info['no_devices']}"))
    lines.append(("backends", ", ".join(info["backends"])))
    lines += [(f"not {name}", why) for name, why in info["unavailable"].items()]
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in lines)
