"""launch/study.py: what its table makes of records that are made up and checked by hand; a tiny study on ranks."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mpi.environments import MPI

from osu_like_bench import machine

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts' folder, to import them from."""
    monkeypatch.syspath_prepend(str(LAUNCH))


@pytest.fixture
def study(launch: None) -> ModuleType:
    return importlib.import_module("study")


@pytest.fixture
def pages(launch: None) -> ModuleType:
    return importlib.import_module("study_page")


def record(method: str, seed: int, accuracy: float, **sent: list[Any]) -> dict[str, Any]:
    """Of two epochs, on 4 ranks and 1000 parameters: a ring sends 2 · 3/4 · 4 · 1000 = 6000 bytes uncompressed."""
    epochs: list[dict[str, Any]] = [
        {"epoch": 1, "step": 5, "loss": 9.0, "accuracy": 0.1},
        {"epoch": 2, "step": 10, "loss": 0.25, "accuracy": accuracy},
    ]
    for name, values in sent.items():
        for epoch, value in zip(epochs, values):
            epoch[name] = value
    about = {
        "date": "2020-01-02T03:04:05",
        "cpu": "one",
        "cores": 1,
        "instruction_set": "none",
        "command": f"run {method}",
    }
    settings = {"task": "digits", "seed": seed, "examples a step": 64}
    return {
        "run": about,
        "method": method,
        "seed": seed,
        "ranks": 4,
        "settings": settings,
        "parameters": 1000,
        "exact_parameters": 50,
        "epochs": epochs,
    }


def test_bytes_and_ratios(study: ModuleType, pages: ModuleType) -> None:
    # 1000 bytes a step at ratio 2, then 500 at ratio 12: (2000 + 6000) / 1500 raw bytes, and 6000 / 750 of a ring's.
    digits = study.STUDIES["digits"]
    found = pages.rows(digits, [record("topk1", 0, 0.9, wire_nbytes=[1000, 500], ratio=[2, 12])])
    assert [row.method.name for row in found] == ["topk1"]
    assert found[0].nbytes == 750
    assert found[0].ratio == pytest.approx(8000 / 1500)
    assert found[0].times == pytest.approx(8.0)
    # 50 parameters stay exact: 300 bytes of a ring's. Raw bytes are 4000 in the mean.
    assert found[0].compressed == pytest.approx(3700 / 450)
    # Through shared memory a rank sends them once: 200 bytes.
    calls = [{"sparse_ring, TopK()": 5, "shared_memory": 5}] * 2
    (shared,) = pages.rows(digits, [record("topk1", 0, 0.9, wire_nbytes=[1000, 500], ratio=[2, 12], calls=calls)])
    assert shared.compressed == pytest.approx(3800 / 550)
    plain = pages.rows(digits, [record("uncompressed", 0, 0.9)])[0]
    assert (plain.nbytes, plain.ratio, plain.times) == (6000, 1, 1)


@pytest.mark.parametrize(("accuracies", "judged"), [([0.975, 0.975], "yes"), ([0.98, 0.9699], "**no**")])
def test_within_one_per_cent_of_the_same_seeds(
    study: ModuleType, pages: ModuleType, accuracies: list[float], judged: str
) -> None:
    # The means of seeds 0 and 1 are 98.5 % and, at least, 97.5 %; seed 2, which only one of them has run, is left out.
    plain = [record("uncompressed", seed, accuracy) for seed, accuracy in enumerate((0.98, 0.99, 0.1))]
    mine = [record("onebit", seed, accuracy) for seed, accuracy in enumerate(accuracies)]
    digits = study.STUDIES["digits"]
    found = pages.rows(digits, mine + plain)
    onebit = next(row for row in found if row.method.name == "onebit")
    assert pages.verdict(digits, onebit, found) == judged
    assert pages.verdict(digits, onebit, [onebit]) == "?"


@pytest.mark.parametrize(("loss", "judged"), [(1.0199, "yes"), (1.0201, "**no**"), (math.nan, "**no**")])
def test_loss_within_two_per_cent_of_the_same_optimizer(
    study: ModuleType, pages: ModuleType, loss: float, judged: str
) -> None:
    text = study.STUDIES["text"]
    records = [record("uncompressed", 0, 0.5), record("uncompressed-adamw", 0, 0.5), record("topk1-adamw", 0, 0.5)]
    for each, value in zip(records, (0.1, 1.0, loss), strict=True):
        each["epochs"][-1]["loss"] = value
    found = pages.rows(text, records)
    assert pages.verdict(text, found[-1], found) == judged


def test_page(study: ModuleType, pages: ModuleType, tmp_path: Path) -> None:
    refused = {**record("qsgd4", 0, 0), "refused": "it would grow"}
    del refused["epochs"]
    strom = record("strom-0.1", 0, 0.5)
    strom["run"]["commit"] = "0abc123"
    for each in (record("uncompressed", 0, 0.98), strom, refused):
        tmp_path.joinpath("study").mkdir(exist_ok=True)
        (tmp_path / "study" / f"{each['method']}-0.json").write_text(json.dumps(each))
    pages.report(study.STUDIES["digits"], tmp_path / "study")
    lines = (tmp_path / "study.md").read_text().splitlines()
    row = {line.split(" | ")[0].lstrip("| "): line for line in lines if line.startswith("| ")}
    assert "98.00" in row["uncompressed"] and "1.0 | 1.0 | 6.0 | 1.0 | yes" in row["uncompressed"]
    assert "50.00" in row["strom-0.1"] and "**no**" in row["strom-0.1"]
    assert "refused | it would grow" in row["qsgd4"]
    assert any(line.startswith("run strom-0.1") for line in lines)
    assert "* Commit not noted: `uncompressed`, `qsgd4`." in lines and "* Commit 0abc123: `strom-0.1`." in lines


def test_the_most_important_methods_are_first_seed_by_seed(study: ModuleType) -> None:
    text = study.STUDIES["text"]
    names = study.in_turn(text, study.chosen(text, "*adamw*"), [1, 0])
    assert names[:3] == ["uncompressed-adamw-1", "zfp8-adamw-1", "minmax4-adamw-1"]
    first = len(text.first) - 1  # the SGD baseline is not asked for
    assert names[first] == "uncompressed-adamw-0" and names[2 * first].endswith("-1")
    assert len(set(names)) == len(names) == 2 * sum("adamw" in method.name for method in text.methods)


_RANKS = """
import json, pathlib, sys
records = pathlib.Path(sys.argv[sys.argv.index("--records") + 1])
for name in sys.argv[sys.argv.index(str(records)) + 1 :]:
    if name.startswith("fp8"):
        sys.exit(1)
    record = json.loads((records / "uncompressed-0.json").read_text())
    method, _, seed = name.rpartition("-")
    (records / f"{name}.json").write_text(json.dumps(record | {"method": method, "seed": int(seed)}))
    print(name, "0.5", flush=True)
"""


def test_a_study_goes_on_behind_one_that_fails_and_later(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mpirun").write_text(_RANKS)
    monkeypatch.setattr(study, "LAUNCH", tmp_path)
    records = tmp_path / "study"
    records.mkdir()
    (records / "uncompressed-0.json").write_text(json.dumps(record("uncompressed", 0, 0.9)))
    words = ["--only", "zfp8,fp8,onebit", "--seeds", "0", "--records", str(records)]
    assert study.main([*words, "--minutes", "0"]) == 0
    said = capsys.readouterr()
    assert not said.out and "3 trainings are still to be done" in said.err
    assert study.main(words) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["zfp8-0", "fp8-0", "onebit-0"]
    assert sorted(path.stem for path in records.glob("*.json")) == ["onebit-0", "uncompressed-0", "zfp8-0"]


def test_what_older_code_learnt_is_run_again_behind_what_is_missing(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mpirun").write_text(_RANKS)
    monkeypatch.setattr(study, "LAUNCH", tmp_path)
    monkeypatch.setattr(machine, "commit", lambda: "0000000")
    records = tmp_path / "study"
    records.mkdir()
    for name, commit in (("uncompressed", "0000000"), ("zfp8", "0000001"), ("onebit", "0000000-dirty")):
        there = record(name, 0, 0.9)
        there["run"]["commit"] = commit
        (records / f"{name}-0.json").write_text(json.dumps(there))
    words = ["--only", "uncompressed,zfp8,onebit,minmax8", "--seeds", "0", "--records", str(records)]
    for ran in (["minmax8-0", "zfp8-0", "onebit-0"], []):  # whose records are copies of the first, and note its commit
        assert study.main(words) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ran


def test_bad_arguments(study: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["--only", "nothing"], "--only nothing"), (["--report"], "holds no records")):
        with pytest.raises(SystemExit) as status:
            study.main([*words, "--records", str(tmp_path / "none")])
        assert status.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.with_torch
@pytest.mark.only_on("openmpi")
@pytest.mark.timeout(300)
def test_tiny_study(mpi: MPI, tmp_path: Path) -> None:
    pytest.importorskip("torch", "2.13")
    pytest.importorskip("sklearn")
    records = tmp_path / "study"
    command = [str(mpi.prefix / "bin" / "python"), str(LAUNCH / "study.py"), "--records", str(records)]
    command += ["--ranks", "2", "--epochs", "1", "--seeds", "3"]
    command += ["--only", "uncompressed,qsgd4-l2,topk1,dgc01,variance*,hybrid-0.03"]

    records.mkdir()
    there = record("uncompressed", 3, 0.9)  # of this code: not run again
    there["run"] |= {"commit": now} if (now := machine.commit()) else {}
    (records / "uncompressed-3.json").write_text(json.dumps(there))
    # In a session of its own, so that its ranks end with it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=280)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, output
    ran = ["topk1", "dgc01", "variance", "variance-packed", "variance-micro", "hybrid-0.03"]
    assert [line.split()[0] for line in output.splitlines()] == ["qsgd4-l2-3", *(f"{name}-3" for name in ran)], output
    for name, ratio in zip(ran, (20, 1.5, 2, 2, 2, 2), strict=True):
        written = json.loads((records / f"{name}-3.json").read_text())
        learned = 0.3 if name != "hybrid-0.03" else 0.0  # of its elements few reach the threshold in so few steps
        assert written["epochs"][-1]["accuracy"] > learned and written["epochs"][-1]["ratio"] > ratio, (name, written)
    refused = json.loads((records / "qsgd4-l2-3.json").read_text())["refused"]
    assert "grow without end" in refused and "\n" not in refused
    page = (tmp_path / "study.md").read_text()
    assert "| topk1 |" in page and "--seed 3 --epochs 24 --codec topk --select exact" in page
