"""Codecs by pattern of parameter names: each parameter's mean is that of its own codec, against NumPy in float64."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch
from check_compress import make_net, total, wrapped
from check_sparse_methods import largest
from mpi.check_observation import logged
from mpi.tensors import assert_same_bits
from mpi.world import nodes_apart, raised
from mpi4py import MPI
from promises import EVERY, is_vote, one_of_each
from torch import nn
from torch.distributed.fsdp import fully_shard

import compcoll.torch
from compcoll import ErrorFeedback
from compcoll.codecs.sparse.sparsifier import Sparsifier
from compcoll.errors import CollectiveMismatch, CompcollError, InvalidArgument, UnknownCodec
from compcoll.plan.cost import DEFAULTS, Link
from compcoll.plan.profile import Place, Stored, save
from compcoll.sparse import TopK

N = 2048  # elements of a parameter
SUMMED = [each for each in one_of_each(EVERY) if not is_vote(each) and not each.needs_reference]
FED_BACK = [each for each in SUMMED if each.feedback_converges("float32")]
"""Every codec that gradients may have with feedback."""
FAMILIES = {
    "ring": [each for each in FED_BACK if not isinstance(each, Sparsifier)],
    "sparse_ring": [each for each in FED_BACK if isinstance(each, Sparsifier)],
}


class Layers(nn.Module):
    """A parameter of each kind in each of several layers, so that kinds alternate; gradients are what is given."""

    def __init__(self, kinds: list[str], layers: int = 3) -> None:
        super().__init__()
        for number in range(layers):
            layer = nn.Module()
            for kind in kinds:
                layer.register_parameter(kind, nn.Parameter(torch.zeros(N)))
            self.add_module(f"layer{number}", layer)

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters() if name in gradients)


def draw(comm: MPI.Intracomm, names: Iterable[str], step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + comm.rank)
    return {name: torch.randn(N, generator=generator) for name in names}


def back_propagate(model: nn.Module, gradients: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    model.zero_grad()
    model(gradients).backward()
    return {name: p.grad.double().numpy().copy() for name, p in model.module.named_parameters()}


def mean(comm: MPI.Intracomm, own: torch.Tensor) -> np.ndarray:
    return total(comm, own.double().numpy()) / comm.size


@contextmanager
def slow_links() -> Iterator[None]:
    """As long as this lasts, communicators are made as if each rank had a node of its own, and links were slow."""
    slow = Link(latency=1e-9, per_byte=1e-3)
    with TemporaryDirectory() as folder:
        stored = Stored(replace(DEFAULTS, between=slow), Place("MPI", ("here",), "host"), "now")
        path = save(stored, Path(folder, "profile.json"))
        with nodes_apart(), mock.patch.dict(os.environ, COMPCOLL_PROFILE=str(path)):
            yield


def check_each_parameter_is_compressed_by_its_own_codec(comm: MPI.Intracomm) -> None:
    """Sparse, dense and no codecs together: a half's grid, int8's error, the ranks' largest elements, exact means."""
    k = 20
    codecs = {"*.halves": "cast:dtype=float16", "*.int8": "int8", "*.top": TopK(k / N, "exact"), "*.none": None}
    kinds = ["int8", "top", "none", "halves", "other"]
    for cap in (25.0, 0.03):  # all in a bucket, or some
        with slow_links():
            model = wrapped(Layers(kinds), bucket_cap_mb=cap)
            compression = compcoll.torch.compress(model, codecs, feedback=False, exclude=())
        exact = {name for name, each in compression.exact.items() if each}
        assert exact == {name for name in compression.exact if name.endswith(("none", "other"))}
        for step in range(3):
            own = draw(comm, compression.exact, step)
            got = back_propagate(model, own)
            assert_same_bits(comm, [p.grad for p in model.parameters()])
            for name, values in got.items():
                kind, wanted = name.rpartition(".")[2], mean(comm, own[name])
                most = comm.allreduce(float(own[name].abs().max()), MPI.MAX)
                error = float(np.abs(values - wanted).max())
                if kind == "top":
                    sent = largest(own[name].double().numpy(), k) / comm.size
                    given = values != 0  # some algorithms add up all of these, some the largest sums only
                    assert k <= np.count_nonzero(given) <= k * comm.size, name
                    np.testing.assert_allclose(values[given], total(comm, sent)[given], atol=1e-6 * most)
                elif comm.size == 1 or name in exact:
                    assert error < 1e-6 * most, name
                elif kind == "halves":
                    assert np.array_equal(values, values.astype(np.float16)) and error < 2 * 2.0**-11 * most, name
                else:
                    assert 1e-3 * most < error < 1.1 * most / 127, (name, error / most)
        if comm.size > 1:
            calls = Counter(call.partition(", ")[2].partition("(")[0] for call in compression.stats.calls.elements())
            assert calls.keys() == {"Cast", "Int8", "TopK", ""}, calls
            # One collective for each codec and bucket, and one for each parameter with a sparse codec.
            assert (calls == {"Cast": 3, "Int8": 3, "TopK": 3 * 3, "": 3}) == (cap == 25.0), calls
        compression.free()


def check_bytes(comm: MPI.Intracomm) -> None:
    """Each parameter's share of what is sent has its codec's size."""
    model = wrapped(Layers(["halves", "int8"]), bucket_cap_mb=25)
    codecs = {"*.halves": "cast:dtype=float16", "*.int8": "int8:block=64"}
    compression = compcoll.torch.compress(model, codecs, exclude=(), algorithm="direct")
    back_propagate(model, draw(comm, compression.exact, 0))
    sent = 3 * N * 2 * (comm.size - 1) / comm.size  # elements of each kind
    expected = sent * (2 + (1 + 4 / 64))
    assert abs(compression.stats.wire_nbytes - expected) <= 0.03 * expected, (compression.stats, expected)
    compression.free()


def check_nothing_is_lost_and_states_go_on(comm: MPI.Intracomm) -> None:
    """With every codec that gradients may have in one model, whose buckets hold several of them."""
    for algorithm, family in FAMILIES.items():
        codecs: dict[str, Any] = {f"*.{each.name}": each for each in family}
        options = {"codec": codecs, "algorithm": algorithm, "exclude": ()}
        model = wrapped(Layers([each.name for each in family], 2), bucket_cap_mb=0.05)
        compression = compcoll.torch.compress(model, **options)
        by_moments = [name for name in compression.exact if name.endswith((".variance", ".hybrid"))]
        moments = {name: torch.full((N,), 1e-9) for name in by_moments}
        due = {name: np.zeros(N) for name in compression.exact}
        layouts = set()
        for step in range(4):
            if by_moments:
                compression.observe(moments)
            own = draw(comm, compression.exact, step)
            got = back_propagate(model, own)
            assert_same_bits(comm, [p.grad for p in model.parameters()])
            layouts.add(tuple(bucket.names for bucket in compression._buckets.values()))
            state = compression.state_dict()
            assert set(state["residuals"]) == set(due) and list(state.get("variance", {})) == by_moments
            for name, each in due.items():
                each += mean(comm, own[name]) - got[name]
                if codecs[f"*.{name.partition('.')[2]}"].conserves == "exact":
                    kept = total(comm, state["residuals"][name].double().numpy())
                    assert np.abs(kept - each).max() < 1e-4, (step, name, np.abs(kept - each).max())
                    assert comm.size == 1 or np.abs(kept).max() > 1e-4, (name, "lost nothing")
        assert len(layouts) > 1 and any(len(names) > 2 for names in min(layouts)), "this proves nothing"

        other = {**codecs, next(iter(codecs)): "cast:dtype=bfloat16" if algorithm == "ring" else "topk:density=0.5"}
        for again in (options, {**options, "codec": other}):  # a residual is the parameter's, whatever its codec is now
            model = wrapped(Layers([each.name for each in family], 2), bucket_cap_mb=0.05)
            resumed = compcoll.torch.compress(model, **again)
            resumed.load_state_dict(comm.allgather(state))
            for kind in ("residuals", "variance"):
                for name, kept in resumed.state_dict().get(kind, {}).items():
                    assert torch.equal(kept, state[kind][name]), (kind, name)
            resumed.free()
        compression.free()


def check_shards(comm: MPI.Intracomm) -> None:
    """Under FSDP2, every codec in one module beside exact parameters, whose rows have one collective for each."""
    fit = [each for each in FED_BACK if not isinstance(each, Sparsifier) or each.state is ErrorFeedback]
    fit = [each for each in fit if not each.additive]  # of which there are no reduce-scatters
    codecs = {f"*.{each.name}": each for each in fit}

    def sharded() -> nn.Module:
        return fully_shard(Layers([*(each.name for each in fit), "other"], 2))

    def gradients_of(model: nn.Module, own: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        model.zero_grad()
        model(own).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: gradient.full_tensor().double().numpy() for name, gradient in found.items()}

    model = sharded()
    options = {"codec": codecs, "algorithm": "direct", "exclude": ()}
    compression = compcoll.torch.compress(model, **options)
    due = {name: np.zeros(N) for name, _ in model.named_parameters()}
    coded = {name for name in due if not name.endswith("other")}
    for step in range(3):
        own = {name: values for name, values in draw(comm, due, step).items() if step != 1 or name != "layer0.cast"}
        for name, values in gradients_of(model, own).items():
            due[name] += mean(comm, own[name]) - values
    state = compression.state_dict()
    assert set(state["residuals"]) == coded
    for name, each in due.items():
        kept = total(comm, state["residuals"][name].double().numpy()) if name in coded else np.zeros(N)
        assert np.abs(kept - each).max() < 1e-4, (name, np.abs(kept - each).max())
        assert comm.size == 1 or name not in coded or np.abs(kept).max() > 1e-5, (name, "lost nothing")
    if comm.size > 1:
        calls = {call.partition(", ")[2]: number for call, number in compression.stats.calls.items() if ", " in call}
        assert calls == {repr(each): 3 for each in fit}, calls

    again = sharded()
    resumed = compcoll.torch.compress(again, **options)
    resumed.load_state_dict(state)
    for step in (3, 4):
        own = draw(comm, due, step)
        one, other = gradients_of(model, own), gradients_of(again, own)
        differ = [name for name in due if one[name].tobytes() != other[name].tobytes()]
        assert not differ, f"{differ} do not go on with the same bits"
    compression.codec = {**codecs, "*.topk": TopK(1.0, "exact")}
    gradients_of(model, draw(comm, due, 5))
    for name, lost in compression.state_dict()["residuals"].items():
        assert not name.endswith("topk") or not lost.any(), name
    error = raised(lambda: setattr(compression, "codec", "int8"))
    assert isinstance(error, InvalidArgument) and "same types" in str(error), error
    for each in (compression, resumed):
        each.free()
    error = raised(lambda: compcoll.torch.compress(again, {"*.topk": "variance", "*": "int8"}))
    assert isinstance(error, InvalidArgument) and "Variance" in str(error) and "Int8" not in str(error), error


def check_moments_are_those_of_some(comm: MPI.Intracomm) -> None:
    """Where second moments are large, nothing is sent; parameters with other codecs need none."""
    model = wrapped(Layers(["other", "variance"], 2))
    codecs = {"*.variance": "variance", "*": "topk:density=0.1,select=exact"}
    compression = compcoll.torch.compress(model, codecs, exclude=(), algorithm="sparse_ring")
    own = draw(comm, compression.exact, 0)
    error = raised(lambda: compression.observe({"layer0.variance": torch.ones(N)}))
    assert isinstance(error, InvalidArgument) and "layer1.variance" in str(error), error
    compression.observe({"layer0.variance": torch.full((N,), 1e9), "layer1.variance": torch.zeros(N)})
    sent = {name: np.count_nonzero(values) for name, values in back_propagate(model, own).items()}
    assert sent["layer0.variance"] == 0 and sent["layer1.variance"] > N / 2, sent
    assert all(0 < sent[f"layer{number}.other"] <= comm.size * 205 for number in (0, 1)), sent
    error = raised(lambda: back_propagate(model, own))
    assert isinstance(error, InvalidArgument) and "second moments" in str(error), error
    compression.free()


def check_a_warm_up(comm: MPI.Intracomm) -> None:
    """Other options in the middle of a run: what was kept is given all the same."""
    model = wrapped(Layers(["top", "other"]), bucket_cap_mb=25)
    start = {"*.top": TopK(0.5, "exact"), "*.other": TopK(0.1, "exact")}
    compression = compcoll.torch.compress(model, start, exclude=(), algorithm="sparse_ring")
    assert compression.codec == start
    due = {name: np.zeros(N) for name in compression.exact}
    for step, density in enumerate((0.5, 0.1, 0.01)):  # also as that of the others
        compression.codec = {**start, "*.top": f"topk:density={density},select=exact"}
        assert compression.codec == {**start, "*.top": TopK(density, "exact")}
        own = draw(comm, compression.exact, step)
        got = back_propagate(model, own)
        residuals = compression.state_dict()["residuals"]
        for name, each in due.items():
            each += mean(comm, own[name]) - got[name]
            np.testing.assert_allclose(total(comm, residuals[name].double().numpy()), each, atol=1e-5)
            most = comm.size * (density if name.endswith("top") else 0.1) * N
            assert most / comm.size <= np.count_nonzero(got[name]) <= most + comm.size, name
    for wrong in (TopK(0.1), {"*.top": TopK(0.1)}, {**start, "*.top": "int8"}, dict(reversed(start.items()))):
        error = raised(lambda wrong=wrong: setattr(compression, "codec", wrong))
        assert isinstance(error, InvalidArgument) and "same types" in str(error), error
    compression.free()


def check_refusals(comm: MPI.Intracomm) -> None:
    model = wrapped(make_net())
    refused: list[tuple[type[CompcollError], str, Any, dict[str, Any]]] = [
        (InvalidArgument, "'hed.*' fits the name of no parameter, such as late.weight", {"hed.*": "int8"}, {}),
        (
            InvalidArgument,
            "'late.weight' fits only parameters that earlier",
            {"*.weight": "int8", "late.weight": None},
            {},
        ),
        (InvalidArgument, "is no pattern of parameter names", {nn.Linear: "int8"}, {}),
        (InvalidArgument, "bits go with one codec", {"*": "minmax"}, {"bits": 2}),
        (InvalidArgument, "codec['*']={} is neither", {"*": {}}, {}),
        (UnknownCodec, "nope", {"late.*": "nope"}, {}),
        (InvalidArgument, "grow without end", {"late.*": "terngrad", "*": "int8"}, {"algorithm": "direct"}),
    ]
    if comm.size > 1:
        odd = comm.rank == comm.size - 1
        mixed = {"late.*": "zfp:rate=12" if odd else "zfp:rate=8", "*": "int8"}
        refused += [
            (CollectiveMismatch, "rate=12", mixed, {}),
            (CollectiveMismatch, "head", {"head.*" if odd else "late.*": "int8"}, {}),
        ]
    for kind, text, codec, options in refused:
        error = raised(lambda codec=codec, options=options: compcoll.torch.compress(model, codec, **options))
        assert isinstance(error, kind) and text in str(error), (kind, text, error)
    for method in (compcoll.torch.ACPSGD, compcoll.torch.PowerSGD):
        error = raised(lambda method=method: method(model, codec={"*": "int8"}))
        assert isinstance(error, InvalidArgument) and "neither a codec nor the name of one" in str(error), error
    compcoll.torch.compress(model, {"late.*": "int8", "*": None}).free()  # the model is as it was


def check_each_codec_is_logged(comm: MPI.Intracomm) -> None:
    codecs = {"late.*": "cast:dtype=float16", "norm.*": "fp8", "*": "int8"}
    with logged(logging.INFO) as records:
        compcoll.torch.compress(wrapped(make_net()), codecs, algorithm="direct").free()
    found = [record.getMessage() for record in records if record.getMessage().startswith("compress: ")]
    expected = ["1 of 9 parameters (2400 of 12820 elements) for Cast", "0 of 9", "2 of 9 parameters (6300 of 12820"]
    assert len(found) == 3 * (comm.rank == 0), found
    for message, text in zip(found, expected):
        assert text in message, message
    with logged(logging.INFO) as records:
        compression = compcoll.torch.compress(wrapped(make_net()), {"late.*": None})
    assert all(compression.exact.values())
    assert comm.rank != 0 or any("no codec was given" in record.getMessage() for record in records)
    compression.free()
