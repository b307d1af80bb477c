"""Training with compressed gradients: checks on ranks, the policy, launch/train_ddp.py and the ddp benchmark."""

from __future__ import annotations

import copy
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", "2.12")
pytest.importorskip("sklearn")

import torch
import torch.distributed as dist
import train_ddp
from mpi.checks import CheckJob
from mpi.environments import MPI, Completed
from mpi.run import expand
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training.muon import RATE, MuonAndAdamW

from compcoll import ErrorFeedback, MinMax
from compcoll.errors import InvalidArgument
from compcoll.sparse import DGCFeedback, TopK, Variance, VarianceFeedback
from compcoll.torch.gradients.bucket import maker_of
from compcoll.torch.gradients.compression import compress
from compcoll.torch.policy import KINDS, SMALLEST, codec_by_name, exact_parameters, kind_of
from osu_like_bench import __main__ as osu_like_bench
from osu_like_bench import ddp
from osu_like_bench.training.models import GPT, NETWORKS
from osu_like_bench.training.processes import Place

MPIRun = Callable[..., Completed]
pytestmark = pytest.mark.with_torch

HERE = Path(__file__).resolve().parent / "gradients"
CHECKS = expand([], HERE)
TRAIN = HERE.parents[2] / "launch" / "train_ddp.py"
RANKS = 3  # neither a power of two nor few


@pytest.fixture(scope="module")
def job(mpi: MPI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckJob]:
    folder = tmp_path_factory.mktemp(f"ddp-{mpi.name}-")
    with closing(CheckJob(RANKS, CHECKS, folder, mpi.prefix, checks=HERE, timeout=100.0)) as job:
        yield job


@pytest.mark.timeout(200)
@pytest.mark.parametrize("check", CHECKS)
def test_check(job: CheckJob, check: str) -> None:
    job.report(check)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_given_and_kept_are_all_between_replicas_too(mpi: MPI, tmp_path: Path) -> None:
    """On four ranks: two replicas of two shards."""
    check = "check_residuals.check_given_and_kept_are_all"
    with closing(CheckJob(4, [check], tmp_path, mpi.prefix, checks=HERE, timeout=400.0)) as job:
        job.report(check)


def test_policy() -> None:
    tied = nn.Linear(40, 50, bias=False)
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(50, 40),
            "attention": nn.MultiheadAttention(40, 4),
            "norm": nn.LayerNorm(4000),
            "batch": nn.BatchNorm2d(4000),
            "tiny": nn.Linear(4, 4),
            "body": nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)),
            "tied": tied,
        }
    )
    tied.weight = model["words"].weight
    compressed = [name for name, exact in exact_parameters(model, KINDS, 1024).items() if not exact]
    matrices = ["attention.in_proj_weight", "attention.out_proj.weight", "body.0.weight", "body.1.weight"]
    assert compressed == matrices
    compressed = [name for name, exact in exact_parameters(model, ["biases", "body.1*"], 1024).items() if not exact]
    norms = [f"{name}.{kind}" for name in ("norm", "batch") for kind in ("weight", "bias")]
    assert sorted(compressed) == sorted(["words.weight", *norms, *matrices[:-1]])
    assert SMALLEST == inspect.signature(compress).parameters["min_numel"].default == 1024
    kinds = {name: kind_of(name, model["body"][0]) for name in ("bias", "body.0.bias", "in_proj_bias", "weight")}
    assert kinds == {"bias": "biases", "body.0.bias": "biases", "in_proj_bias": "biases", "weight": None}
    every = exact_parameters(model, [], 1)
    assert list(every) == [name for name, _ in model.named_parameters()] and not any(every.values())
    only_body = exact_parameters(model, lambda name, parameter: not name.startswith("body"), 1)
    assert [name for name, exact in only_body.items() if not exact] == [
        f"body.{number}.{kind}" for number in (0, 1) for kind in ("weight", "bias")
    ]
    sizes = nn.ParameterDict({str(size): nn.Parameter(torch.zeros(size)) for size in (1023, 1024, 1025)})
    assert exact_parameters(sizes, [], 1024) == {"1023": True, "1024": False, "1025": False}
    for kind in (nn.Embedding, nn.EmbeddingBag):
        assert exact_parameters(kind(50, 40, sparse=True), [], 1) == {"weight": True}
        assert exact_parameters(kind(50, 40), [], 1) == {"weight": False}
    whole = nn.ParameterDict({"numbers": nn.Parameter(torch.zeros(5000, dtype=torch.int64), requires_grad=False)})
    assert exact_parameters(whole, [], 1) == {"numbers": True}
    with pytest.raises(InvalidArgument, match=r"'bodies' .* body|'bodies' .* words"):
        exact_parameters(model, ["bodies"], 1)


@pytest.mark.parametrize(
    "kind", ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "GroupNorm", "LayerNorm"]
)
def test_norms_are_known_by_any_name(kind: str) -> None:
    base = getattr(nn, kind)
    layer = type("Scaled", (base,), {})(*(4, 8)[kind != "GroupNorm" :])
    assert kind_of("weight", layer) == "norms"


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_instance_norms_are_known_by_any_name(dimensions: int) -> None:
    layer = type("Scaled", (getattr(nn, f"InstanceNorm{dimensions}d"),), {})(8, affine=True)
    assert kind_of("weight", layer) == "norms"


def test_policy_of_what_is_shared() -> None:
    """What several owners, or names, share goes by all of its names, and stands under the first."""
    layer, matrix = nn.Linear(40, 50, bias=False), nn.Parameter(torch.zeros(40, 50))
    shared_layer = nn.ModuleDict({"first": layer, "second": layer})
    shared_matrix = nn.ParameterDict({"first": matrix, "second": matrix})
    for model, first in ((shared_layer, "first.weight"), (shared_matrix, "first")):
        for pattern in ("first*", "second*"):
            assert exact_parameters(model, [pattern], 1) == {first: True}
            assert exact_parameters(model, lambda name, _, begin=pattern[:-1]: name.startswith(begin), 1) == {
                first: True
            }
        assert exact_parameters(model, [], 1) == {first: False}


def test_the_first_pattern_that_fits_decides() -> None:
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "first": layer, "second": layer, "head": nn.Linear(4, 4)})
    exact = exact_parameters(model, ["*.bias"], 1)
    one, two, three = MinMax(bits=1), MinMax(bits=2), MinMax(bits=3)

    def weights(codec: Any) -> dict[str, Any]:
        found = codec_by_name(codec, model, exact)
        assert list(found) == [name for name, _ in model.named_parameters()]
        assert not any(codec for name, codec in found.items() if name.endswith("bias"))
        return {name.partition(".")[0]: codec for name, codec in found.items() if name.endswith("weight")}

    assert weights(one) == {"body": one, "first": one, "head": one} and not any(weights(None).values())
    assert weights({"body.*": one, "*": two}) == {"body": one, "first": two, "head": two}
    assert weights({"head.*": None, "*d*": one, "*": two}) == {"body": one, "first": one, "head": None}  # by "second"
    assert weights({"second.w*": one, "first.*": two, "b*": three}) == {"body": three, "first": one, "head": None}
    assert weights({"*.*": one, "*": two}) == weights(one) and not any(weights({}).values())
    for pattern, why in (("third.*", "fits the name of no parameter, such as body.weight"), ("first.*", "earlier")):
        with pytest.raises(InvalidArgument, match=why):
            weights({"*.weight": one, "*.bias": one, pattern: two})


def test_patterns_fit_names_without_wrappers() -> None:
    """As states have them: with activation checkpointing or torch.compile, a model keeps its patterns."""

    def layers() -> nn.Module:
        return nn.Sequential(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}))

    checkpointed = layers()
    checkpointed[0] = checkpoint_wrapper(checkpointed[0])
    one, two = MinMax(bits=1), MinMax(bits=2)
    for model in (layers(), checkpointed, torch.compile(layers()), torch.compile(checkpointed)):
        names = dict.fromkeys(name for name, _ in model.named_parameters())
        by_pattern = ("0.a.*", "*.a.weight", next(iter(names)))
        for pattern in by_pattern:
            found = list(codec_by_name({pattern: one, "0.*": two}, model, dict.fromkeys(names, False)).values())
            assert found[0] == one and found[2:] == [two, two], (names, pattern)
            exact = list(exact_parameters(model, [pattern], 1).values())
            assert exact[0] and exact[2:] == [False, False], (names, pattern)
        with pytest.raises(InvalidArgument, match=r"such as 0\.a\.weight"):
            codec_by_name({"2.*": one}, model, dict.fromkeys(names, False))
        with pytest.raises(InvalidArgument, match=r"such as 0\.a\.weight"):
            exact_parameters(model, ["2.*"], 1)


def train(mpirun: MPIRun, folder: Path, name: str, *words: str | Path, ranks: int = 2) -> list[dict[str, Any]]:
    path = folder / f"{name}.json"
    mpirun(ranks, TRAIN, "--threads", "1", "--json", path, *words, timeout=200)
    epochs: list[dict[str, Any]] = json.loads(path.read_text())["epochs"]
    return epochs


def results(epochs: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(epoch["loss"], epoch["accuracy"]) for epoch in epochs]


@pytest.mark.slow
@pytest.mark.first_mpi
@pytest.mark.timeout(600)
def test_training_reaches_the_same_accuracy_and_resumes_exactly(mpirun: MPIRun, tmp_path: Path) -> None:
    codec = ["--codec", "minmax", "--bits", "3", "--epochs", "4"]
    whole = train(mpirun, tmp_path, "whole", *codec)
    assert whole[-1]["ratio"] > 5 and any("MinMax" in call for call in whole[-1]["calls"])
    assert whole[-1]["accuracy"] > 0.96  # uncompressed: 0.98

    keep = ["--checkpoint", tmp_path / "kept", "--checkpoint-every", "30"]
    steps = whole[0]["step"]
    interrupted = train(mpirun, tmp_path, "interrupted", *codec, *keep, "--stop-after", str(2 * steps + 20))
    assert results(interrupted) == results(whole)[:2]
    resumed = train(mpirun, tmp_path, "resumed", *codec, *keep, "--resume")
    assert results(resumed) == results(whole)[2:]
    assert not list((tmp_path / "kept").glob("*.unfinished"))

    more = ["--resume", "--batch", "32", "--epochs", "5", "--backend", "compcoll"]
    other_ranks = train(mpirun, tmp_path, "other", *codec, *keep, *more, ranks=1)
    assert other_ranks[0]["epoch"] == 5 and other_ranks[0]["accuracy"] > 0.95


@pytest.mark.slow
@pytest.mark.first_mpi
@pytest.mark.timeout(600)
def test_low_rank_training_resumes_exactly(mpirun: MPIRun, tmp_path: Path) -> None:
    low = ["--low-rank", "acpsgd", "--rank", "2", "--exact-steps", "10", "--epochs", "2"]
    whole, rest = resumed_before_its_end(mpirun, tmp_path, *low)
    assert whole[-1]["ratio"] > 10 and whole[-1]["accuracy"] > 0.3
    assert results(rest) == results(whole)[1:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compressed_adam_resumes_exactly(mpirun: MPIRun, tmp_path: Path) -> None:
    """A run goes on from step 44, in the warm-up of 50 steps, by a codec that rounds at random."""
    words = ["--optimizer", "onebit-adam", "--gradient-codec", "qsgd:bits=4", "--exact-steps", "50", "--steps", "60"]
    whole, rest = resumed_before_its_end(mpirun, tmp_path, *words)
    assert whole[0]["step"] == 44 and results(rest) == results(whole)[1:]
    assert whole[-1]["accuracy"] > 0.5


def resumed_before_its_end(mpirun: MPIRun, folder: Path, *words: str) -> list[list[dict[str, Any]]]:
    """The epochs of a whole run, and of one that goes on from its last checkpoint but one."""
    kept = folder / "kept"
    whole = train(mpirun, folder, "whole", *words, "--checkpoint", kept)
    shutil.rmtree(max(kept.iterdir()))
    return [whole, train(mpirun, folder, "rest", *words, "--checkpoint", kept, "--resume")]


@pytest.mark.slow
@pytest.mark.first_mpi
def test_bad_arguments_end_the_ranks(mpirun: MPIRun) -> None:
    benchmark = ("osu_like_bench", "ddp", "--parameters", "1000", "--compare", "acpsgd:rank=0")
    for program, *words in ((TRAIN, "--codec", "terngrad"), benchmark):
        done = mpirun(2, program, *words, check=False)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.report
        assert sum("error:" in line for line in done.stderr.splitlines()) == 1, done.report


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank without MPI, whose process does not end if it gives up."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for module in (train_ddp, ddp):
        monkeypatch.setattr(module, "start", lambda backend: Place(0, 1, 1))
        monkeypatch.setattr(module, "share_cores", lambda place, threads: 1)
    monkeypatch.setattr(train_ddp, "give_up", sys.exit)
    monkeypatch.setattr(ddp, "leave", lambda: None)
    monkeypatch.setenv("RANK", "0")
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--codec", "terngrad"], "grow without end"),
        (["--resume"], "--checkpoint"),
        (["--task", "cifar10", "--data", "."], "data_batch_1.bin"),
        (["--codec", "zfp", "--rate", "1"], "rate"),
        (["--task", "text", "--dgc", "0.01", "--algorithm", "sparse_ring"], "AdamW"),
        (["--low-rank", "acpsgd", "--rank", "0"], "rank=0"),
        (["--gradient-codec", "qsgd"], "--gradient-codec goes with --optimizer onebit-adam"),
        (["--optimizer", "onebit-adam", "--gradient-codec", "qsgd:bits"], "option=value"),
        (["--optimizer", "muon"], "--task text"),
        (["--task", "text", "--optimizer", "muon", "--diloco", "5"], "--diloco"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_bad_training_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_ddp.py", *words])
    with pytest.raises(SystemExit, match="2"):
        train_ddp.main()
    assert said in capsys.readouterr().err


def test_muon_moves_the_matrices_of_hidden_layers() -> None:
    """All else moves by AdamW; a run that loads a state goes on with the same bits."""
    torch.manual_seed(0)
    models = [GPT(8, layers=2, width=16) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    matrices = [(n, p) for n, p in models[1].named_parameters() if p.ndim == 2 and n.startswith("blocks.")]
    others = [(n, p) for n, p in models[1].named_parameters() if n not in dict(matrices)]
    assert len(matrices) == 8 and {"embedding.weight", "out.weight", "norm.bias"} <= dict(others).keys()
    oracles = [torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1)]
    oracles.append(torch.optim.AdamW(others, lr=1e-3, weight_decay=0.1))
    ours, resumed = (MuonAndAdamW(model, 1e-3, 0.1) for model in (models[0], models[2]))

    def step(model: nn.Module, *optimizers: Any, seed: int) -> torch.Tensor:
        tokens = torch.randint(256, (4, 8), generator=torch.Generator().manual_seed(seed))
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(tokens).logsumexp(-1).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    for seed in range(3):
        assert torch.equal(step(models[0], ours, seed=seed), step(models[1], *oracles, seed=seed))
    models[2].load_state_dict(models[0].state_dict())
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert torch.equal(step(models[2], resumed, seed=3), step(models[0], ours, seed=3))


@pytest.mark.slow
def test_not_under_mpi() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(HERE / "refused.py")]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **world, "RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    try:
        for rank, process in enumerate(ranks):
            said = process.communicate(timeout=60)[0]
            assert f"rank {rank}: NotUnderMPI" in said and "mpirun" in said
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.slow
def test_mpi_without_threads(mpirun: MPIRun, tmp_path: Path) -> None:
    done = mpirun(2, HERE / "refused.py", "funneled", tmp_path / "store")
    for rank, output in enumerate(done.ranks):
        assert f"rank {rank}: ThreadsUnavailable" in output.stdout and "thread_level" in output.stdout


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_benchmark(mpirun: MPIRun, tmp_path: Path) -> None:
    path = tmp_path / "ddp.json"
    names = ["gloo", "gloo+fp16", "gloo+bf16", "gloo+powersgd:rank=1", "compcoll", "compcoll+zfp:rate=8"]
    size = ["--parameters", "300000", "--bucket", "0.3", "-i", "2", "-x", "1", "--algorithm", "ring"]
    done = mpirun(2, "osu_like_bench", "ddp", *size, "--compare", ",".join(names), "--json", path, timeout=100)
    records = {record["contender"]: record for record in json.loads(path.read_text())["results"]}
    assert list(records) == names
    for name, record in records.items():
        assert name in done.stdout
        assert record["wrong"] == 0 and record["iterations"] == 2 and abs(record["parameters"] / 300000 - 1) < 0.02
        assert record["median_ms"] == pytest.approx(record["compute_ms"] + record["exposed_ms"])
    zfp, plain = records["compcoll+zfp:rate=8"], records["compcoll"]
    assert 3.5 < zfp["ratio"] <= 4 and zfp["codec_ms"] > 0 and 1e-3 < zfp["error"] < 0.2
    assert plain["ratio"] == 1 and plain["error"] < 1e-5
    raw = 4 * zfp["parameters"] / 1e6  # two ranks: each sends its buffer once
    assert plain["sent_megabytes"] == pytest.approx(raw, rel=0.01)
    assert zfp["sent_megabytes"] == pytest.approx(raw / zfp["ratio"], rel=0.01)


@pytest.mark.slow
@pytest.mark.first_mpi
@pytest.mark.timeout(400)
def test_benchmark_of_low_rank(mpirun: MPIRun, tmp_path: Path) -> None:
    path = tmp_path / "ddp.json"
    names = ["ssgd", "powersgd:rank=2", "acpsgd:rank=2", "acpsgd:rank=2:ddp=True", "powersgd-late:rank=2"]
    size = ["--model", "resnet50", "--backward", "20", "-i", "2", "-x", "0"]
    mpirun(2, "osu_like_bench", "ddp", *size, "--compare", ",".join(names), "--json", path, timeout=300)
    records = {record["contender"]: record for record in json.loads(path.read_text())["results"]}
    assert list(records) == names
    for record in records.values():
        assert record["wrong"] == 0 and record["parameters"] == 25557032
        assert record["compute_ms"] > 30  # both passes sleep
    assert records["ssgd"]["error"] < 1e-5 and records["ssgd"]["sent_megabytes"] == pytest.approx(102.2, rel=0.01)
    acp, power = records["acpsgd:rank=2"], records["powersgd:rank=2"]
    late = records["powersgd-late:rank=2"]
    assert late["sent_megabytes"] == power["sent_megabytes"] and late["error"] == pytest.approx(power["error"])
    assert acp["error"] > 0.5 and acp["sent_megabytes"] < 0.7 * power["sent_megabytes"] < 2


def test_networks_have_their_published_sizes() -> None:
    """torchvision's documentation (ResNets), and Hugging Face's models of the published BERTs."""
    sizes = {name: sum(layer.parameters for layer in layers()) for name, layers in NETWORKS.items()}
    published = {"resnet50": 25557032, "resnet152": 60192808, "bert-base": 109482240, "bert-large": 335141888}
    assert sizes == published


BAD = ["gloo+nothing", "acpsgd:rank=0", "compcoll+zfp:rate", "gloo+fp16:rank=1", "acpsgd:width=1"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("names", BAD)
def test_bad_contenders(capsys: pytest.CaptureFixture[str], names: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        osu_like_bench.main(["ddp", "--parameters", "1000", "--compare", names])
    assert "error:" in capsys.readouterr().err


def test_feedback_is_made_by_what_is_given() -> None:
    def made(codec: Any, feedback: Any) -> type | None:
        make = maker_of(codec, feedback)
        return None if make is None else type(make())

    assert made(None, True) is made(None, ErrorFeedback) is made(MinMax(), False) is None
    assert made(MinMax(), True) is made(TopK(0.1), True) is made(MinMax(), ErrorFeedback) is ErrorFeedback
    assert made(Variance(), True) is VarianceFeedback and made(TopK(0.1), DGCFeedback) is DGCFeedback
    for wrong in (1, "yes", None, ErrorFeedback(), dict, lambda: 1):
        with pytest.raises(InvalidArgument, match=r"feedback=.* callable that returns an ErrorFeedback"):
            maker_of(MinMax(), wrong)
