"""A rank of test_groups.py, started as torchrun does it, without mpi4py: runs the checks in their
order, and writes what became of each to the file that it is given.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

MODULES = {
    "alike": ("check_collectives", "check_errors", "check_experts", "check_training", "check_optimizers", "check_gpus"),
    "on nodes": ("check_nodes", "check_meshes", "check_gpus_on_nodes"),
    "long": ("check_tuning", "check_silence", "check_endings"),
    "compiled": ("check_compiled", "check_compiled_models"),
    "by all compilers": ("check_compilers",),
}
"""By the job whose ranks run them."""


def checks(job: str) -> list[str]:
    """The names of all checks of a job, in their order."""
    here = Path(__file__).parent
    return [
        f"{module}.{line[4 : line.index('(')]}"
        for module in MODULES[job]
        for line in (here / f"{module}.py").read_text().splitlines()
        if line.startswith("def check_")
    ]


def main() -> None:
    """Run the checks; one that fails does not keep the others from being tried."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    outcomes: dict[str, str] = {}
    for name in checks(sys.argv[2]):
        module, _, check = name.partition(".")
        try:
            getattr(importlib.import_module(module), check)()
            outcomes[name] = "passed"
        except BaseException:
            outcomes[name] = traceback.format_exc()
        Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(outcomes))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
