"""The kernels, which are compiled when compcoll is installed: `compcoll.kernels._host`."""

from importlib.util import find_spec
from pathlib import Path

if find_spec(f"{__name__}._host") is None:
    raise ImportError(
        f"Python imports compcoll from its sources in {Path(__file__).parents[2]}, which are not compiled: start your "
        "program from another folder, or install them with pip install -e"
    )
