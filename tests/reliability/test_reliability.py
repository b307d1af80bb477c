"""Dead ranks and long runs: what docs/reliability.md promises. With --long, as much as `make reliability` shows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi.environments import MPI, Completed

from compcoll.plan.choose import ALLREDUCE, BY_MPI, NAMES, SHARED_MEMORY

SCRIPTS = Path(__file__).resolve().parent
ULFM = ("--with-ft", "ulfm")
TIMEOUT = 5.0  # of survive.py's communicators

WITHOUT_MESSAGES = [*BY_MPI, SHARED_MEMORY]
KILLED = [f"{collective}.{algorithm}" for collective, algorithms in NAMES.items() for algorithm in algorithms]
KILLED.append(f"allreduce.{SHARED_MEMORY}")
MESSAGES, MILLISECONDS = ["0", "1", "3", "7"], ["2ms", "15ms"]
BLOCKING = [f"blocking.{name}" for name in (*ALLREDUCE, "native")]
KILLED += [*BLOCKING, f"blocking.{SHARED_MEMORY}"]
SHORT = ["blocking.direct:1:8ms", "allreduce.ring:0:3", "allreduce.recursive_doubling:-1:1", "bcast.binomial:1:0"]
SHORT.append("allreduce.native:0:2ms")
SHARING = ["allreduce.shared_memory:0:1ms", "allreduce.shared_memory:-1:8ms"]


def survived(done: Completed) -> list[dict[str, Any]]:
    return [json.loads(line) for rank in done.ranks for line in rank.stdout.splitlines() if line.startswith("{")]


def moments(killed: str) -> list[str]:
    """What MPI's own algorithms, recordings and shared memory send is not counted: there time alone tells."""
    if killed in BLOCKING or killed.partition(".")[2] in WITHOUT_MESSAGES:
        return ["1ms", "2ms", "4ms", "8ms", "16ms", "32ms"]
    # What a rank posts in one collective; a broadcast is soon over.
    return [*(["0", "1", "2", "3"] if killed == "bcast.binomial" else MESSAGES), *MILLISECONDS]


def cases_of(killed: str) -> list[str]:
    return [f"{killed}:{who}:{moment}" for who, moment in itertools.product(["0", "1", "-1"], moments(killed))]


def kill(
    mpirun: Callable[..., Completed], progress: str, cases: list[str], figure: Callable[[str], None], what: str
) -> None:
    """In each job one rank after the other dies, until two are left."""
    lines: list[dict[str, Any]] = []
    for begin in range(0, len(cases), 6):
        arguments = cases[begin : begin + 6]
        ranks = len(arguments) + 2
        done = mpirun(ranks, SCRIPTS / "survive.py", progress, *arguments, timeout=60, check=False, options=ULFM)
        told = survived(done)
        # After case k there are ranks - 1 - k left, and each of them says so.
        assert len(told) == sum(ranks - 1 - k for k in range(len(arguments))), done.report
        assert {line["case"] for line in told} == set(arguments)
        assert max(line["seconds"] for line in told) < TIMEOUT + 1, done.report
        lines += told
    figure(
        f"{what}, progress={progress!r}: {len(cases)} ranks killed and survived, longest time to the error "
        f"{max(line['seconds'] for line in lines):.3f} s, {sum(line['error'] == 'PeerFailed' for line in lines)} of "
        f"{len(lines)} survivors knew that a rank had died"
    )


@pytest.mark.only_on("openmpi")  # for User-Level Failure Mitigation
def test_any_rank_may_die(mpirun: Callable[..., Completed], figure: Callable[[str], None]) -> None:
    kill(mpirun, "wait", SHORT, figure, "some algorithms")
    kill(mpirun, "wait", SHARING, figure, "shared memory")


@pytest.mark.long
@pytest.mark.only_on("openmpi")  # for User-Level Failure Mitigation
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", KILLED)
def test_any_rank_may_die_at_any_moment_of_any_algorithm(
    mpirun: Callable[..., Completed], figure: Callable[[str], None], killed: str
) -> None:
    kill(mpirun, "wait", cases_of(killed), figure, killed)


@pytest.mark.long
@pytest.mark.only_on("openmpi")  # for User-Level Failure Mitigation
def test_any_rank_may_die_beside_progress_threads(
    mpirun: Callable[..., Completed], figure: Callable[[str], None]
) -> None:
    kill(mpirun, "thread", [*SHORT, "allgather.direct:1:1"], figure, "some algorithms")
    kill(mpirun, "thread", SHARING, figure, "shared memory")


# Beside lossless wires, whose trainings have plain PyTorch as their oracle, what loses something.
LOSSLESS = ("--codec", "cast", "--codec-dtype", "float32")
TRAININGS = [
    pytest.param(3, "0:35", LOSSLESS, id="lossless"),
    pytest.param(4, "0:31,2:45", LOSSLESS, id="lossless-twice", marks=pytest.mark.long),
    pytest.param(4, "3:1,1:20", ("--codec", "minmax", "--bits", "3"), id="minmax", marks=pytest.mark.long),
    pytest.param(
        *(4, "0:31,2:45", ("--codec", "topk", "--density", "0.1", "--algorithm", "sparse_ring")),
        id="topk",
        marks=pytest.mark.long,
    ),
]
EPOCHS = 2


@pytest.mark.slow
@pytest.mark.only_on("openmpi")  # for User-Level Failure Mitigation
@pytest.mark.with_torch
@pytest.mark.parametrize(("ranks", "killed", "words"), TRAININGS)
def test_training_goes_on(
    mpi: MPI,
    mpirun: Callable[..., Completed],
    tmp_path: Path,
    ranks: int,
    killed: str,
    words: tuple[str, ...],
    figure: Callable[[str], None],
) -> None:
    """Ranks are killed while gradients are on their way; two go on from the last step that has ended."""
    kept, record = tmp_path / "kept", tmp_path / "record.json"
    done = mpirun(
        *(ranks, SCRIPTS / "elastic.py", killed, "--threads", "1", "--batch", "64", "--epochs", str(EPOCHS), *words),
        *("--checkpoint", kept, "--json", record),
        timeout=200,
        check=False,
        options=ULFM,
    )
    assert record.exists(), done.report
    told = json.loads(record.read_text())
    dead = [int(death.partition(":")[0]) for death in killed.split(",")]
    assert [death["ranks"] for death in told["deaths"]] == [[rank] for rank in dead], done.report
    assert told["alive"] == [rank for rank in range(ranks) if rank not in dead], done.report
    assert len(told["checksums"]) == 2 and len(set(told["checksums"])) == 1, told
    steps, losses = told["epochs"][0]["step"], [epoch["loss"] for epoch in told["epochs"]]
    assert [epoch["step"] for epoch in told["epochs"]] == [steps * (1 + number) for number in range(EPOCHS)]
    assert all(death["step"] < EPOCHS * steps for death in told["deaths"]), told
    assert losses == sorted(losses, reverse=True), losses

    from training import checkpoint

    found = checkpoint.load(kept)
    assert found is not None and len(found[1]) == 2
    if words == LOSSLESS:
        check_trained(found[0]["model"], told["deaths"], steps, ranks)
    else:
        assert all(any(part.abs().max() > 0 for part in own["residuals"].values()) for own in found[1])
    figure(f"training {' '.join(words)}: ranks died after steps {[d['step'] for d in told['deaths']]}, losses {losses}")


def check_trained(parameters: dict[str, Any], deaths: list[dict[str, Any]], steps: int, ranks: int) -> None:
    """They are those of the same training by plain PyTorch, with the mean over those that were alive at each step.

    Means are rounded in one of the ways that there are: added from the first rank or from the last, divided before or
    after. By that alone PyTorch's own trainings differ by 3e-4 on some processors.
    """
    import torch

    threads, failures = torch.get_num_threads(), []
    torch.set_num_threads(1)  # as on the ranks
    for backwards, late in itertools.product((False, True), repeat=2):
        expected = plain_training(deaths, steps, ranks, backwards=backwards, late=late)
        try:
            for name, value in expected.items():
                torch.testing.assert_close(parameters[name], value, rtol=1e-3, atol=1e-4)
        except AssertionError as failure:
            failures.append(str(failure))
    torch.set_num_threads(threads)
    assert len(failures) < 4, "\n\n".join(failures)


def plain_training(
    deaths: list[dict[str, Any]], steps: int, ranks: int, *, backwards: bool, late: bool
) -> dict[str, Any]:
    """What PyTorch makes of the model in this process; gradients are added ``backwards``, divided ``late``."""
    import torch
    from training.tasks import TASKS, loss_of

    task = TASKS["digits"](None)
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    batches = [
        [batch for epoch in range(EPOCHS) for batch in task.batches(64 * ranks, rank, ranks, seed=0, epoch=epoch)]
        for rank in range(ranks)
    ]
    for step in range(EPOCHS * steps):
        dead = [rank for death in deaths if death["step"] <= step for rank in death["ranks"]]
        alive = [rank for rank in range(ranks) if rank not in dead]
        optimizer.zero_grad()
        for rank in reversed(alive) if backwards else alive:
            loss = loss_of(model(batches[rank][step].inputs), batches[rank][step].targets)
            (loss if late else loss / len(alive)).backward()
        if late:
            for parameter in model.parameters():
                parameter.grad /= len(alive)
        part = step / (EPOCHS * steps)
        optimizer.param_groups[0]["lr"] = 0.05 * min((part + 1e-3) / 0.05, (1 - part) / 0.95)
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.with_torch
@pytest.mark.slow
def test_elastic_training_needs_ulfm(mpi: MPI, mpirun: Callable[..., Completed]) -> None:
    done = mpirun(1, SCRIPTS.parents[1] / "launch" / "train_ddp.py", "--elastic", check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.report
    assert "MPI goes on without a rank only with User-Level Failure Mitigation" in done.stderr, done.report


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_many_collectives(
    mpi: MPI, mpirun: Callable[..., Completed], seed: int, long: bool, figure: Callable[[str], None]
) -> None:
    count = 50_000 if long else 2_000
    done = mpirun(4, SCRIPTS / "soak.py", str(count), str(seed), timeout=900 if long else 300)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["collectives"] == count
    assert (told["descriptors_grown_by"], told["requests_left"]) == (0, 0), told
    assert told["memory_grown_by"] < 16 << 20, told
    figure(f"soak on {mpi.name}, seed {seed}: {told}")
