"""Compile the CUDA programs that the steps of `gpu_check.py` launch, into the folder COMPCOLL_CUBINS.

    COMPCOLL_CUBINS=folder python launch/gpu_programs.py 90

This needs NVRTC, but no GPU. The argument is the GPU's compute capability without a dot.
"""

from __future__ import annotations

import sys
from pathlib import Path

from compcoll.dtypes import DTYPES
from compcoll.gpu.programs import Program
from compcoll.tools.cubins import compiled, programs
from osu_like_bench.codecs import USUAL

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from gpu.test_gpu import CODECS


def wanted() -> list[Program]:
    """List the programs of all tests and benchmarks."""
    return list(dict.fromkeys(one for dtype in DTYPES for one in programs([*CODECS, *USUAL], dtype)))


if __name__ == "__main__":
    for text, _ in compiled(wanted(), sys.argv[1:]):
        print(text, flush=True)
