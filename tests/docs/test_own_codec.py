"""The codec of docs/own-codec.md is known by name once it is installed as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "own-codec.md").read_text()


def test_the_installed_codec_is_known_by_name(tmp_path: Path) -> None:
    """Written to the folder as pip would."""
    code, project = (re.search(rf"^```{kind}\n(.*?)^```", PAGE, re.M | re.S) for kind in ("python", "toml"))
    assert code and project
    group = re.search(r'^\[project\.entry-points\."(.*)"\]\n(\w+) = "(.*)"$', project[1], re.M)
    distribution = re.search(r'^name = "(.*)"\nversion = "(.*)"$', project[1], re.M)
    assert group and distribution and f'py-modules = ["{group[3].partition(":")[0]}"]' in project[1]
    (tmp_path / f"{group[3].partition(':')[0]}.py").write_text(code[1])
    info = tmp_path / f"{distribution[1].replace('-', '_')}-{distribution[2]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution[1]}\nVersion: {distribution[2]}\n")
    (info / "entry_points.txt").write_text(f"[{group[1]}]\n{group[2]} = {group[3]}\n")

    (codec,) = re.findall(r"^mpirun .*--codec (\S+)", PAGE, re.M)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "compcoll", "explain", "--bytes", "16M", "--codec", codec, "-p", "4"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert codec.partition(":")[0] in done.stdout
