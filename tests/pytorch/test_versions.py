"""PyTorch's release: one that is too old, or lacks a name, is refused on first use, and never by ``import torch``."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", "2.12")

import compcoll.torch  # noqa: E402
from compcoll.torch import loading  # noqa: E402
from compcoll.torch.backend import autoload  # noqa: E402


@pytest.mark.parametrize("version", ["1.13.1", "2.9.1+cu128", "2.11.0"])
@pytest.mark.parametrize("name", sorted(compcoll.torch.__all__))
def test_an_old_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str, name: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError, match=r"needs PyTorch 2\.12 or later, but PyTorch " + version.replace("+", r"\+")):
        compcoll.torch.__getattr__(name)
    with pytest.raises(ImportError, match=r"pip install 'torch>=2\.12'"):
        autoload._create(SimpleNamespace(group_size=1), None)


@pytest.mark.parametrize("version", ["2.12.1", "2.13.0+cpu", "2.14.0a0+gitabc", "3.0.0"])
def test_other_releases_are_tried(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert compcoll.torch.__getattr__("stats") is compcoll.torch.stats


@pytest.mark.parametrize("missing", ["torch", "torch.distributed.fsdp", "cupy", "torchvision"])
def test_a_name_that_pytorch_lacks(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def lacks(module: str, package: str) -> None:
        raise ImportError(f"cannot import name 'x' from {missing!r}", name=missing)

    monkeypatch.setattr(loading, "import_module", lacks)
    said = "does not work with PyTorch" if missing.partition(".")[0] == "torch" else "^cannot import name 'x'"
    with pytest.raises(ImportError, match=said):
        compcoll.torch.__getattr__("compress")


def test_import_torch_says_nothing_of_an_old_release() -> None:
    program = (
        "import torch; torch.__version__ = '2.9.1'; import compcoll.torch; "
        "assert 'compcoll' in torch.distributed.Backend.backend_list; compcoll.torch.compress"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("ImportError: compcoll.torch needs PyTorch 2.12"), done.stderr
