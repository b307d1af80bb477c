"""launch/dist.py: which interpreter gets which wheel, and what ends it with an error. Nothing is built here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def dist() -> ModuleType:
    return importlib.import_module("dist")


def test_one_wheel_serves_all_pythons_from_the_stable_abi_on(
    dist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def step(*words: Any, **_: Any) -> str:
        if "--print-build-identifiers" in words:
            return "".join(f"cp{version.replace('.', '')}-manylinux\n" for version in dist.VERSIONS)
        if "--sdist" in words:
            (words[words.index("--outdir") + 1] / "some-1.tar.gz").touch()
        if "wheel" in words:
            folder = words[words.index("-w") + 1]
            folder.mkdir()
            (folder / f"some-{folder.name}.whl").touch()
            built.append(folder.name)
        return ""

    monkeypatch.setattr(dist, "REPOSITORY", tmp_path)
    monkeypatch.setattr(dist, "step", step)
    monkeypatch.setattr(dist, "environment", lambda python, name, *packages: tmp_path / name)
    monkeypatch.setattr(dist, "audited", lambda wheel, tools, folder: wheel)
    wheels = dist.build({version: Path("python") for version in dist.VERSIONS})
    assert built == ["3.10", "3.11", "3.12"]
    assert {version: wheel.stem for version, wheel in wheels.items()} == {
        "3.10": "some-3.10",
        "3.11": "some-3.11",
        **dict.fromkeys(("3.12", "3.13", "3.14"), "some-3.12"),
    }
    monkeypatch.setattr(dist, "step", lambda *words, **_: "cp310-manylinux\n")
    with pytest.raises(dist.DistError, match=r"without Python 3\.11, 3\.12, 3\.13, 3\.14"):
        dist.build({"3.10": Path("python")})


def test_what_fails_is_told(
    dist: ModuleType, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dist.main(["--python", "9.9"]) == 1
    assert "none of Python 9.9 is on PATH" in capfd.readouterr().err
    with pytest.raises(dist.DistError, match=r"exit status 3 of .*\n.*it broke"):
        dist.step(sys.executable, "-c", "print('it broke'); raise SystemExit(3)", quiet=True)
    assert dist.step(sys.executable, "-c", "print(7)", quiet=True) == "7\n"


def test_a_wheel_that_is_too_large_or_for_this_system_only_is_refused(
    dist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repaired(name: str, size: int) -> Any:
        def step(*words: Any, **_: Any) -> str:
            if "repair" in words:
                folder = words[words.index("-w") + 1]
                folder.mkdir(parents=True)
                (folder / name).write_bytes(bytes(size))
            return ""

        return step

    for name, size, said in (
        ("a-1-cp311-cp311-linux_x86_64.whl", 9, "runs only on this system"),
        ("a-1-cp312-abi3-manylinux_2_34_x86_64.whl", dist.LARGEST + 1, "3000001 bytes, more than 3000000"),
    ):
        monkeypatch.setattr(dist, "step", repaired(name, size))
        with pytest.raises(dist.DistError, match=said):
            dist.audited(tmp_path / name / "a.whl", tmp_path, tmp_path)
