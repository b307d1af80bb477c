"""Commands of README and the pages are run by a test, here or by name, or need what is told; their code compiles."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest
from mpi.environments import Completed

import compcoll
from compcoll.__main__ import main as compcoll_main
from compcoll.plan.choose import NAMES
from osu_like_bench.parser import build_parser

TOP = Path(__file__).parents[2]
PAGES = [TOP / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((TOP / "docs").rglob("*.md"))

STARTS = r"(?:sudo |[A-Z_]+=\S+ )*(?:\.venv/bin/)?"
PROGRAMS = (
    r"(?:mpirun|mpiexec|python3?|make|launch/|torchrun|pip|srun|sbatch|qsub|kubectl|docker|py-spy|df|which|git|cmake)\b"
)
COMMAND = re.compile(f"^{STARTS}{PROGRAMS}")

HERE = r"^python -m compcoll (explain|choose|simulate) (?!.*--plot)"
"""What is run here."""

ELSEWHERE = {
    r"-m compcoll simulate .*--plot": "tests/simulation/test_simulation.py::test_command_draws",
    r"-m compcoll cubins": "tests/gpu/test_cubins.py::test_ahead_of_time",
    r"-m compcoll doctor": "tests/tools/test_doctor.py::test_under_mpirun",
    r"-m compcoll tune": "tests/mpi/check_tuning.py::check_tune",
    r"-m compcoll run": "tests/mpi/test_run.py::test_an_unchanged_program",
    r"-m compcoll trace": "tests/tools/test_trace.py::test_merged",
    r"-m osu_like_bench\.backends": "tests/pytorch/test_backend.py::test_benchmark_of_backends",
    r"-m osu_like_bench\.waiting": "tests/reliability/test_waits.py::test_who_waits_sleeps",
    r"-m osu_like_bench ddp": "tests/pytorch/test_gradients.py::test_benchmark",
    r"-m osu_like_bench selection": "tests/bench/test_bench.py::test_selection",
    r"-m osu_like_bench codecs": "tests/bench/test_bench.py::test_codecs",
    r"-m osu_like_bench plot": "tests/bench/test_bench.py::test_allreduce_contenders_and_records",
    rf"-m osu_like_bench ({'|'.join(NAMES)})\b": "tests/bench/test_bench.py::test_collectives",
    r"launch/train_ddp\.py": (
        "tests/pytorch/test_gradients.py::test_training_reaches_the_same_accuracy_and_resumes_exactly"
    ),
    r"^docker (build|run --rm compcoll$)": "tests/launch/test_docker.py::test_the_image_runs_two_ranks",
    r"launch/train_jax\.py": "tests/docs/test_jax.py::test_code_of_the_page_and_training",
    r"^(mpirun|COMPCOLL\S+ .*mpirun) .*python (that_program|first_sum|script)\.py": (
        "tests/docs/test_commands.py::test_first_examples_print_what_they_say"
    ),
    r"launch/mpirun -n \d python (script|first_sum)\.py": (
        "tests/docs/test_commands.py::test_first_examples_print_what_they_say"
    ),
    r"^mpirun .*-m compcoll run .*poisson\.py": ("tests/reliability/test_solvers.py::test_the_program_runs_unchanged"),
    r"launch/netlab (up|check|run|down)|launch/netlab$": "tests/launch/test_netlab.py::test_allreduce_between_hosts",
    r"launch/gpu_check\.py figures": "tests/launch/test_gpu_check.py::test_summary_and_pages_have_the_figures",
    r"-m osu_like_bench\.pages(?!\.)": "tests/pages/test_run.py::test_launches_take_turns_and_are_merged",
    r"-m osu_like_bench\.pages\.errors": "tests/pages/test_errors.py::test_the_command_measures_every_codec",
    r"^make figures": "tests/pages/test_stale.py::test_a_page_is_older_if_what_it_times_has_changed_since",
}
"""The tests that run commands of a kind, on smaller cases: what the command begins, they end."""

NEEDED = {
    r"^make (bench|test|install|check|docs|MPI=)": "a clone of its own: CI makes these",
    r"^make (test-all|mutants|reliability|measurements|docs-links|gpu-rehearsal)": "an hour, root or the internet",
    r"^(\.venv/bin/)?python -m pytest": "the tests themselves",
    r"^make dist|^git (commit|tag|push) |build/fresh": "a release, or several Pythons and a package index",
    r"^pip (install|download)": "a package index",
    r"^git clone ": "the repository's address",
    r"^([A-Z_]+=\S+ )?(torchrun|mpirun) .*[ ]train\.py": "a program of the reader's: tests/pytorch has ours",
    r"^(srun|sbatch|qsub|kubectl|docker)|SLURM_NTASKS": "a batch system, Kubernetes or Docker",
    r"launch/gpu-of-rank": "a GPU",
    r"^(df|which|py-spy|export|cat|module)\b": "nothing of compcoll's",
    r"launch/gpu_(timeline|ipc|check)\.py": "a GPU, or a Python 3.12 and a package index",
}
"""What commands need that tests have not."""


class Block(NamedTuple):
    """A block of a page."""

    page: str
    language: str
    text: str


@lru_cache(maxsize=1)
def blocks() -> tuple[Block, ...]:
    """All fenced and indented blocks."""
    found = []
    for page in PAGES:
        text, name = page.read_text(), str(page.relative_to(TOP))
        for language, body in re.findall(r"^```+(\S*)\n(.*?)^```", text, re.S | re.M):
            found.append(Block(name, language, body))
        outside = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
        for body in re.findall(r"(?:^    \S.*\n)+(?:^ {4,}\S.*\n)*", outside, re.M):
            found.append(Block(name, "", re.sub("^    ", "", body, flags=re.M)))
    return tuple(found)


def commands() -> Iterator[tuple[str, str]]:
    """Pages and their commands."""
    for block in blocks():
        if block.language in ("", "sh"):
            for line in block.text.replace("\\\n", " ").splitlines():
                command = re.sub(r"\s+#.*| +(?= )", "", line).strip()
                if command and not command.startswith("#") and (block.language == "sh" or COMMAND.match(line)):
                    yield block.page, command


def test_all_blocks_are_found() -> None:
    assert len(list(commands())) > 100
    assert sum(block.language == "python" for block in blocks()) > 20


def test_every_command_is_run_or_needs_what_is_told() -> None:
    kinds = [HERE, *ELSEWHERE, *NEEDED]
    unknown = [row for row in commands() if not any(re.search(kind, row[1]) for kind in kinds)]
    assert not unknown
    unused = [kind for kind in kinds if not any(re.search(kind, command) for _, command in commands())]
    assert not unused, "kinds of which there is no command any more"


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_the_tests_named_are_there(kind: str) -> None:
    path, name = ELSEWHERE[kind].split("::")
    assert re.search(rf"def {name}\(", (TOP / path).read_text()), ELSEWHERE[kind]


def test_commands_without_ranks_print_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPCOLL_PROFILE", "defaults")
    run = sorted({command for _, command in commands() if re.search(HERE, command)})
    assert len(run) >= 4
    for command in run:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert compcoll_main(shlex.split(command)[3:]) == 0, command
        assert len(said.getvalue().splitlines()) > 3, command


def test_arguments_of_the_benchmark_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    of_bench = [command for _, command in commands() if "-m osu_like_bench " in command and '"$@"' not in command]
    assert len(of_bench) >= 10
    for command in of_bench:
        words = shlex.split(command.split("-m osu_like_bench ", 1)[1])
        assert build_parser().parse_args(words), command


def test_arguments_of_training_are_understood() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    train = importlib.import_module("train_ddp")
    given = {
        re.sub(r"\$\(.*\)", ".", command.split("launch/train_ddp.py", 1)[1])
        for _, command in commands()
        if "launch/train_ddp.py" in command
    }
    assert len(given) > 20
    for words in given:
        assert train.parser().parse_args(shlex.split(words)), words


@pytest.mark.parametrize(
    "block", [block for block in blocks() if block.language == "python"], ids=lambda block: block.page
)
def test_code_compiles_and_knows_the_names(block: Block) -> None:
    if "…" in block.text:
        pytest.skip("left open where the reader goes on")
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"compcoll(\.\w+)*", path := ast.unparse(node)):
            thing: object = compcoll
            if path.startswith("compcoll.torch"):
                pytest.importorskip("torch")
            for name in path.split(".")[1:]:
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"{getattr(thing, '__name__', '')}.{name}")
                thing = getattr(thing, name)


def test_first_examples_print_what_they_say(tmp_path: Path, mpirun: Callable[..., Completed]) -> None:
    """All in one start of ranks."""
    pages = ["README.md", "docs/start/mpi.md", "docs/own-codec.md"]
    code = {page: [block.text for block in blocks() if block[:2] == (page, "python")] for page in pages}
    code["docs/own-codec.md"] = ["\n".join(code["docs/own-codec.md"])]
    program = tmp_path / "program.py"
    program.write_text("\n".join(code[page].pop(0) for page in pages))
    said = mpirun(4, program, timeout=100).stdout.strip().splitlines()
    assert len(said) == len(pages)
    for page, line in zip(pages, said, strict=True):
        assert f"`{line}`" in re.sub(r"\s+", " ", (TOP / page).read_text())


def test_gains_in_the_readme_are_those_of_choose() -> None:
    text = (TOP / "README.md").read_text()
    (command,) = re.findall(r"^python -m compcoll (choose .*)", text, re.M)
    told = {link: gain for gain, link in re.findall(r"([\d.]+)\sat\s(\d+)\sGb/s", text)}
    found = {}
    for link in ("1", "10", "25", "100"):
        words = re.sub(r"--link \S+", f"--link {link}gbit --profile defaults", command)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            compcoll_main(shlex.split(words))
        (choice,) = re.findall(r"^choice: (.*)", said.getvalue(), re.M)
        gain = re.search(r"([\d.]+) ×", choice)
        found[link] = f"{float(gain[1]):.1f}" if gain else choice.partition(":")[0]
    assert found == {**told, "100": "native"}


def test_readme_is_short() -> None:
    assert len((TOP / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "measurements" not in page.parts], ids=lambda page: page.stem
)
def test_prose_has_short_lines(page: Path) -> None:
    """Tables and code may be wider."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []
