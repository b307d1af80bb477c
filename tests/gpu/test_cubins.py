"""Machine code of the CUDA kernels: compiled once for all who use a folder, and kept there."""

from __future__ import annotations

import subprocess
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from compcoll import SZP, ZFP, MinMax, __main__, errors
from compcoll.gpu import cubins
from compcoll.gpu.programs import program
from compcoll.tools.cubins import programs

ONE, OTHER = program("zfp", "float32"), program("cast", "float32")


class Compiler:
    """Writes nothing that runs, and counts."""

    def __init__(self, version: str = "13.0") -> None:
        self.version = version
        self.compiled: list[str] = []

    def compile(self, source: str, options: list[str]) -> tuple[bytes, str]:
        self.compiled.append(next(option for option in options if option.startswith("-arch")))
        return f"{self.version} {options}".encode(), ""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setenv("COMPCOLL_CUBINS", str(tmp_path / "kept"))
    made = Compiler()
    monkeypatch.setattr(cubins, "nvrtc", lambda: made)
    return made


def test_one_compiles_for_all(compiler: Compiler) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: cubins.make(ONE, "90"), range(8)))
    assert compiler.compiled == ["-arch=sm_90"] and len(paths) == 1
    assert paths == set(cubins.kept(ONE, "90"))
    assert {path.suffix for path in cubins.folder().iterdir()} == {".cubin", ".lock"}  # nothing half done


def test_who_compiles_too_long_is_not_waited_for(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubins, "_SECONDS_TO_COMPILE", 0.05)
    cubins.folder().mkdir(parents=True)
    with cubins._alone(cubins._path(ONE, "90", compiler).with_suffix(".lock")):  # type: ignore[arg-type]
        assert cubins.make(ONE, "90") in cubins.kept(ONE, "90")


def test_what_fails_leaves_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(cubins.os, "replace", failing)
        assert cubins.make(ONE, "90") is None
    assert {path.suffix for path in cubins.folder().iterdir()} == {".lock"} and not cubins.kept(ONE, "90")
    assert cubins.make(ONE, "90") is not None


def test_what_a_name_depends_on(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Source, options, GPU and compiler; not where the sources are."""
    path = cubins.make(ONE, "90")
    changed = ONE._replace(options=(*ONE.options, "-DMORE"))
    digest = ONE._replace(options=tuple(option.replace("DIGEST=0x", "DIGEST=0x1") for option in ONE.options))
    for which, arch in ((OTHER, "90"), (changed, "90"), (digest, "90"), (ONE, "100")):
        assert not cubins.kept(which, arch)
    elsewhere = ONE._replace(options=("-I/elsewhere", *ONE.options[1:]))
    assert cubins.kept(elsewhere, "90") == [path]
    newer = Compiler("13.1")
    monkeypatch.setattr(cubins, "nvrtc", lambda: newer)
    assert cubins.kept(ONE, "90") == [path]  # also what another compiler has made
    own = cubins.make(ONE, "90")
    assert cubins.kept(ONE, "90") == [own, path] and newer.compiled == ["-arch=sm_90"]
    monkeypatch.setattr(cubins, "nvrtc", lambda: compiler)
    assert cubins.kept(ONE, "90") == [path, own]
    monkeypatch.setattr(cubins, "nvrtc", lambda: None)
    assert sorted(cubins.kept(ONE, "90")) == sorted((path, own)) and cubins.make(ONE, "80") is None


def test_on_which_gpus_it_runs(compiler: Compiler) -> None:
    """Those of the same major version that are not older."""
    built = {arch: cubins.make(ONE, arch) for arch in cubins.ARCHITECTURES}
    for arch, found in (("80", "80"), ("86", "80"), ("90", "90"), ("100", "100"), ("103", "100")):
        assert cubins.kept(ONE, arch) == [built[found]]
    assert not cubins.kept(ONE, "75") and not cubins.kept(ONE, "120")


def test_a_machine_with_a_driver_only(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what was compiled elsewhere, by whatever version, in a folder that it need not be able to write to."""
    path = cubins.make(ONE, "90")
    cubins.folder().chmod(0o555)
    monkeypatch.setattr(cubins, "nvrtc", lambda: None)
    assert cubins.kept(ONE, "90") == [path] and not cubins.kept(OTHER, "90") and cubins.make(OTHER, "90") is None


def test_without_a_folder_to_write_to(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMPCOLL_CUBINS", str(tmp_path / "file" / "folder"))
    assert cubins.make(ONE, "90") is None and not cubins.kept(ONE, "90")


def test_programs_of_a_call() -> None:
    """Those that its coders launch: the codec's own, casts of values as they are, of integers, and of sparse sums."""
    ours = programs([ZFP(rate=8), MinMax()], "float32")
    assert ["-DCOMPCOLL_ZFP" in one.options for one in ours] == [False, True, False, False, False]
    assert programs([ZFP(tolerance=1e-3)], "float32") == programs([], "float32")  # the host's
    assert programs([MinMax()], "bfloat16")[:2] != ours[:2]
    assert set(programs([SZP()], "float64")) - set(programs([], "float64")) == {program("szp", "float64")}


def test_ahead_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the real compiler, for a GPU that is not here; a second time nothing is compiled."""
    compiler = cubins.nvrtc()
    if compiler is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed: make install")
    monkeypatch.setenv("COMPCOLL_CUBINS", str(tmp_path))
    words = ["cubins", "--arch", "90", "--codec", "cast"]
    assert __main__.main(words) == 0
    assert {path.read_bytes()[:4] for path in tmp_path.glob("*.cubin")} == {b"\x7fELF"}
    assert "4 files" in (said := capsys.readouterr().out) and str(tmp_path) in said and compiler.version in said
    with monkeypatch.context() as patch:
        patch.setattr(cubins.NVRTC, "compile", None)
        assert __main__.main(words) == 0
        assert __main__.main(["cubins", "--codec", "nonsense"]) == 1
    with pytest.raises(errors.UnsupportedDevice, match="no_such_option"):
        compiler.compile(ONE.source, ["--no_such_option"])
    monkeypatch.setattr(cubins, "nvrtc", lambda: None)
    capsys.readouterr()
    assert __main__.main(words) == 1 and "pip install" in capsys.readouterr().err


def test_a_compiler_that_does_not_look_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC 13.0 of a wheel opens its builtins by their name only; the wheel has alternatives that are not meant."""
    folder, builtins = tmp_path / "cu13" / "lib", "libnvrtc-builtins.so.13.99"
    folder.mkdir(parents=True)
    opens = f'''#include <dlfcn.h>
    extern "C" void nvrtcVersion(int* major, int* minor) {{
        *major = 13, *minor = dlopen("{builtins}", RTLD_LAZY) ? 99 : 0;
    }}
    '''
    for name, source in ((builtins, ""), ("libnvrtc.so.13", opens)):
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(folder / name), f"-Wl,-soname,{name}", "-ldl"]
        subprocess.run(command, input=source.encode(), check=True)
    for name in ("libnvrtc.alt.so.13", "libnvrtc-builtins.alt.so.13.99"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    nvidia = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(cubins.importlib.util, "find_spec", lambda name: nvidia)
    compiler = cubins.nvrtc.__wrapped__()
    assert compiler is not None and compiler.version == "13.99"


def test_a_driver_is_all_that_a_machine_must_have() -> None:
    """CuPy's extra `ctk` brings compiler and headers."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for version in ("12", "13"):
        assert [extra.partition(">")[0] for extra in extras[f"cuda{version}"]] == [f"cupy-cuda{version}x[ctk]"]
