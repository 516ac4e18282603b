"""What build_info() and `python -m coconet_ops` tell."""

import json
import subprocess
import sys

import pytest
import torch

import coconet_ops as co
from coconet_ops import _C, _build_info

DEVICE = {
    "name": "NVIDIA H200",
    "compute_capability": (9, 0),
    "multiprocessors": 132,
    "memory": 139 << 30,
}


class FakeBackend:
    """What the extension tells of its CUDA part."""

    def __init__(self, version, targets, devices=(), why=""):
        self.version, self.targets = version, targets
        self.devices, self.why = devices, why

    def device_count(self):
        return len(self.devices), self.why

    def device_info(self, index):
        return dict(self.devices[index])


WITHOUT = FakeBackend("", "", why="built without CUDA")
NO_DRIVER = FakeBackend("13.0", "sm_90a,compute_90", why="no driver")
ONE_GPU = FakeBackend("13.0", "sm_90a,compute_90", [DEVICE])


@pytest.fixture
def build(monkeypatch):
    """build_info() as if the extension, torch and the machine were these."""

    def info(cuda, nccl="", torch_cuda=None):
        monkeypatch.setattr(_C, "cuda_backend", lambda: cuda)
        monkeypatch.setattr(_C, "nccl_version", nccl)
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        return co.build_info()

    return info


def test_keys_are_those_documented():
    info = co.build_info()
    documented = {
        *("version", "torch", "compiler", "isa", "cuda", "nccl"),
        *("devices", "no_devices", "backends", "unavailable"),
    }
    assert set(info) == documented
    assert set(info["cuda"]) == {"built", "why", "nvcc", "architectures"}
    assert set(info["nccl"]) == {"built", "why", "version"}
    assert all(f"``{key}``" in co.build_info.__doc__ for key in documented)


def test_this_build():
    info = co.build_info()
    assert info["version"] == co.__version__
    assert info["torch"] == torch.__version__
    assert info["isa"] and info["compiler"]
    assert {"shm", "local"} <= set(info["backends"])
    assert info["cuda"]["built"] == (not info["cuda"]["why"])
    assert info["cuda"]["built"] == bool(info["cuda"]["nvcc"] and info["cuda"]["architectures"])
    assert bool(info["devices"]) == (not info["no_devices"])


def test_without_cuda(build):
    info = build(WITHOUT)
    assert info["backends"] == ("shm", "local")
    why = "built without CUDA"
    assert info["unavailable"] == {"local on CUDA": why, "cuda_peer": why}
    assert not info["nccl"]["built"] and info["nccl"]["why"]


def test_cuda_but_torch_has_none(build):
    info = build(ONE_GPU)
    assert info["devices"] == [
        {
            "index": 0,
            "name": "NVIDIA H200",
            "capability": "9.0",
            "multiprocessors": 132,
            "memory": 139 << 30,
        }
    ]
    assert "has no CUDA" in info["unavailable"]["cuda_peer"]
    assert "has no CUDA" in info["unavailable"]["local on CUDA"]


def test_cuda_without_a_driver(build):
    info = build(NO_DRIVER, torch_cuda="13.0")
    assert info["unavailable"] == {"local on CUDA": "no driver", "cuda_peer": "no driver"}


def test_everything_is_there(build):
    info = build(ONE_GPU, nccl="2.28.9", torch_cuda="13.0")
    assert info["backends"] == ("shm", "local", "cuda_peer")
    assert info["unavailable"] == {}
    assert info["cuda"] == {
        "built": True,
        "why": "",
        "nvcc": "13.0",
        "architectures": ["sm_90a", "compute_90"],
    }
    assert info["nccl"] == {"built": True, "why": "", "version": "2.28.9"}
    lines = _build_info.report(info).splitlines()
    assert any("sm_90a, compute_90" in line and "nvcc 13.0" in line for line in lines)
    assert any("cuda:0" in line and "NVIDIA H200, 9.0, 132" in line for line in lines)


def test_no_shared_memory(build, monkeypatch):
    def refuse(heap_bytes):
        raise OSError("memfd_create: not permitted")

    monkeypatch.setattr(_C, "Rendezvous", refuse)
    info = build(WITHOUT)
    assert "shm" not in info["backends"]
    assert info["unavailable"]["shm"] == "no shared memory: memfd_create: not permitted"


def test_command_prints_the_same():
    command = [sys.executable, "-m", "coconet_ops"]
    text = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    info = co.build_info()
    assert text.strip() == _build_info.report(info)
    text = subprocess.run([*command, "--json"], text=True, capture_output=True, check=True).stdout
    assert json.loads(text) == json.loads(json.dumps(info))
