"""What the studies' tables make of trainings that are made up and checked by hand; and a tiny study on ranks."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from mpi.environments import MPI

from osu_like_bench.pages import run, study
from osu_like_bench.pages.records import Case, Record

TOP = Path(__file__).resolve().parents[2]
DIGITS, TEXT = study.DIGITS, study.TEXT


def row(seed: int, accuracy: float, loss: float = 0.25, **more: list[Any]) -> dict[str, Any]:
    """Of two epochs, on 4 ranks and 1000 parameters: a ring sends 2 · 3/4 · 4 · 1000 = 6000 bytes uncompressed."""
    epochs: list[dict[str, Any]] = [
        {"epoch": 1, "step": 5, "loss": 9.0, "accuracy": 0.1},
        {"epoch": 2, "step": 10, "loss": loss, "accuracy": accuracy},
    ]
    for name, values in more.items():
        for epoch, value in zip(epochs, values):
            epoch[name] = value
    settings = {"task": "digits", "seed": seed, "examples a step": 64}
    output = {"run": {"ranks": 4}, "settings": settings, "parameters": 1000, "exact_parameters": 50, "epochs": epochs}
    (found,) = study.rows(output)
    return {"launch": seed, "commit": "0abc123", "date": "2020-01-02"} | found


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "study.json")


def give(record: Record, name: str, *rows: dict[str, Any]) -> study.Method:
    about = {"cpu": "one", "cores": 1, "instruction_set": "none"}
    record.cases[name] = Case("launch/mpirun -n 4 run --seed {launch}", run=about, results=list(rows))
    return study.Method(name, record.cases[name])


def test_bytes_and_ratios(record: Record) -> None:
    # 1000 bytes a step at ratio 2, then 500 at ratio 12: (2000 + 6000) / 1500 raw bytes, and 6000 / 750 of a ring's.
    found = give(record, "topk1", row(0, 0.9, wire_nbytes=[1000, 500], ratio=[2, 12]))
    assert found.mean("sent") == 750
    assert found.ratio == pytest.approx(8000 / 1500)
    assert found.times == pytest.approx(8.0)
    # 50 parameters stay exact: 300 bytes of a ring's. Raw bytes are 4000 in the mean.
    assert found.of_compressed == f"{3700 / 450:.1f}; {5700 / 200:.0f} at the end"
    # Through shared memory a rank sends them once: 200 bytes.
    calls = [{"sparse_ring, TopK()": 5, "shared_memory": 5}] * 2
    shared = give(record, "topk1", row(0, 0.9, wire_nbytes=[1000, 500], ratio=[2, 12], calls=calls))
    assert shared.of_compressed.startswith(f"{3800 / 550:.1f};")
    plain = give(record, "uncompressed", row(0, 0.9))
    assert (plain.mean("sent"), plain.ratio, plain.times, plain.of_compressed) == (6000, 1, 1, "1.0")


@pytest.mark.parametrize(("accuracies", "judged"), [([0.975, 0.975], "yes"), ([0.98, 0.9699], "**no**")])
def test_within_one_per_cent_of_the_same_seeds(record: Record, accuracies: list[float], judged: str) -> None:
    # The means of seeds 0 and 1 are 98.5 % and, at least, 97.5 %; seed 2, which only one of them has run, is left out.
    plain = give(record, "uncompressed", *(row(*each) for each in enumerate((0.98, 0.99, 0.1))))
    onebit = give(record, "onebit", *(row(*each) for each in enumerate(accuracies)))
    assert study.verdict(DIGITS, onebit, [plain, onebit]) == judged
    assert study.verdict(DIGITS, onebit, [onebit]) == "?"
    assert "* Seed 0, 1 alone: `onebit`." in list(study._summary(DIGITS, record))


@pytest.mark.parametrize(("loss", "judged"), [(1.0199, "yes"), (1.0201, "**no**"), (math.nan, "**no**")])
def test_loss_within_two_per_cent_of_the_same_optimizer(record: Record, loss: float, judged: str) -> None:
    for name, value in (("uncompressed", 0.1), ("uncompressed-adamw", 1.0), ("topk1-adamw", loss)):
        give(record, name, row(0, 0.5, value))
    found = study.methods(record)
    assert found[-1].baseline == "uncompressed-adamw"
    assert study.verdict(TEXT, found[-1], found) == judged


def test_page(record: Record) -> None:
    give(record, "uncompressed", row(0, 0.98))
    give(record, "strom-0.1", row(0, 0.5) | {"commit": "1abc123"})
    record.cases["qsgd4"] = Case("run qsgd4", missing="refused", remark="it would grow")
    record.cases["onebit"] = Case("run onebit")
    lines = list(study._table(DIGITS, record))
    assert "98.00" in lines[2] and "1.0 | 1.0 | 6.0 | 1.0 | yes" in lines[2]
    assert "50.00" in lines[3] and "**no**" in lines[3]
    assert "refused | it would grow" in lines[4] and {line.count(" |") for line in lines[2:]} == {lines[0].count(" |")}
    summary = list(study._summary(DIGITS, record))
    assert summary == ["* Not run yet: `onebit`.", "* Within 1 %: none.", "* Not within 1 %: `strom-0.1`."]
    assert "launch/mpirun -n 4 run --seed 0  # strom-0.1" in list(study._commands(record))
    commits = ["* Commit 0abc123: `uncompressed`.", "* Commit 1abc123: `strom-0.1`.", "* Commit not noted: `qsgd4`."]
    assert list(study._commits(record)) == commits
    (about,) = study._about(DIGITS, record)
    assert (
        about == "2020-01-02: one, 1 cores, none; 4 ranks. The task: digits, 64 examples a step, 2 epochs (10 steps)."
    )


def test_every_method_is_held_against_one_that_there_is() -> None:
    for page in study.PAGES:
        record = page.record()
        assert {method.baseline for method in study.methods(record)} <= record.cases.keys()


@pytest.mark.with_torch
def test_muons_trainings_are_adamws() -> None:
    """Each training by AdamW that averages gradients has one by Muon with the same options, and the record has it."""
    pytest.importorskip("torch", "2.13")
    import train_ddp

    pages = {page.name: page.record().cases for page in study.PAGES}
    options = {
        page: {
            name: vars(
                train_ddp.parser().parse_args(each.command.split("train_ddp.py ")[1].replace("{launch}", "0").split())
            )
            for name, each in cases.items()
        }
        for page, cases in pages.items()
    }
    muon, different = options["study-muon"], ("optimizer", "batch", "steps", "seed")
    averaged = {n: each for n, each in options["study-text"].items() if "adamw" in n and each["optimizer"] is None}
    assert len(averaged) > 30 and muon.keys() == {name.replace("adamw", "muon") for name in averaged}
    for name, adamw in averaged.items():
        mine = muon[name.replace("adamw", "muon")]
        assert mine["optimizer"] == "muon"
        assert {n: mine[n] for n in mine if n not in different} == {n: adamw[n] for n in adamw if n not in different}
    for name, case in study.by_muon(TOP / "docs" / "measurements").items():
        assert pages["study-muon"][name].command == case.command


@pytest.mark.slow
@pytest.mark.with_torch
@pytest.mark.only_on("openmpi")
@pytest.mark.timeout(600)
def test_tiny_study(mpi: MPI, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", "2.12")
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "executable", str(mpi.prefix / "bin" / "python"))
    monkeypatch.setattr(run, "BUILD", record.path.parent)
    monkeypatch.setattr(run, "TRIES", 1)  # whatever runs beside
    monkeypatch.chdir(TOP)
    page, names = study.PAGES[0], ("dgc01", "variance-packed", "variance-micro")
    for name in names:
        command = page.record().cases[name].command.replace("-n 4", "-n 2").replace("--epochs 24", "--epochs 1")
        record.cases[name] = Case(command)
    assert not run.Measurement(page, record).run(names)
    for name, ratio in zip(names, (1.5, 2, 2), strict=True):
        (found,) = record.cases[name].results
        assert found["accuracy"] > 0.3 and found["raw"] / found["sent"] > ratio, (name, found)
