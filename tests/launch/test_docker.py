"""launch/Dockerfile: what it copies is there, and where containers can be built, its image runs two ranks.

Without a registry, DOCKER_BASE names a base image that is here, and DOCKER_BUILD_OPTIONS has more options of the build.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi.environments import Completed

TOP = Path(__file__).parents[2]
DOCKERFILE = TOP / "launch" / "Dockerfile"
PAGE = TOP / "docs" / "launching" / "docker.md"
SECONDS = 1500
RESULT = r"^(2 ranks, relative error \d\.\de-\d\d)$"


def test_everything_that_the_build_needs_is_sent_to_it() -> None:
    ignored = (TOP / ".dockerignore").read_text().split()
    assert ignored[0] == "**"
    sent = {line[1:] for line in ignored if line.startswith("!")}
    assert all((TOP / path).exists() for path in sent)
    copied = re.findall(r"^COPY (?!--from)(\S+)", DOCKERFILE.read_text(), re.M)
    assert set(copied) - {"."} <= sent
    project = (TOP / "pyproject.toml").read_text()
    packages = re.findall(r'"(\w+)"', re.findall(r"wheel\.packages = \[(.*)\]", project)[0])
    files = re.findall(r'^(?:readme = |license-files = \[)"(\w[\w.]*)"', project, re.M)
    assert len(packages) == 2 and len(files) == 2
    assert {*packages, *files, "CMakeLists.txt", "constraints.txt", "pyproject.toml"} <= sent


def test_arguments_are_those_of_the_page() -> None:
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE.read_text(), re.M))
    assert arguments == {
        name
        for row in re.findall(r"^\| (`[A-Z].*?) \|", PAGE.read_text(), re.M)
        for name in re.findall(r"`(\w+)`", row)
    }


def test_the_first_sum(mpirun: Callable[..., Completed]) -> None:
    said = re.findall(RESULT, mpirun(2, TOP / "launch" / "first_sum.py").stdout, re.M)
    assert said and said[0] in PAGE.read_text()


def builder() -> str:
    """The program that builds and runs containers here."""
    for name in ("docker", "podman", "buildah"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True).returncode == 0:
            return name
    pytest.skip("no docker, podman or buildah that works here")


def run(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, cwd=TOP)
    assert not check or done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(SECONDS + 60)
def test_the_image_runs_two_ranks() -> None:
    """As a user who is not root."""
    tool = builder()
    base = os.environ.get("DOCKER_BASE", "")
    if not base:
        (base,) = re.findall(r"^ARG BASE=(\S+)", DOCKERFILE.read_text(), re.M)
        if run(tool, "pull", base, check=False).returncode:
            pytest.skip(f"{tool} cannot pull {base}: set DOCKER_BASE to a Debian image that is here")
    more = shlex.split(os.environ.get("DOCKER_BUILD_OPTIONS", ""))
    image = "compcoll-test"
    run(tool, "build", "--build-arg", f"BASE={base}", *more, "-f", str(DOCKERFILE), "-t", image, ".")
    script = "id -un; mpirun -n 2 python3 first_sum.py"
    if tool == "buildah":
        container = run(tool, "from", image).stdout.strip()
        try:
            said = run(tool, "run", container, "--", "sh", "-c", script).stdout
        finally:
            run(tool, "rm", container)
    else:
        said = run(tool, "run", "--rm", image, "sh", "-c", script).stdout
        assert re.search(RESULT, run(tool, "run", "--rm", image).stdout, re.M)
    assert said.startswith("compcoll\n") and re.search(RESULT, said, re.M), said
