"""What launch/netlab takes for the load of others while it measures."""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


class TestLoadMeter:
    """Bounds that hold whatever else the machine does meanwhile."""

    SPIN = (sys.executable, "-c", "import time; e = time.time() + 1.5\nwhile time.time() < e: pass")

    @staticmethod
    def measured() -> tuple[ModuleType, Callable[[], float]]:
        if not sys.platform.startswith("linux"):
            pytest.skip("reads Linux's /proc")
        sys.path.insert(0, str(LAUNCH))
        try:
            module = importlib.import_module("netlab_run")
        finally:
            sys.path.remove(str(LAUNCH))
        began, before = time.monotonic(), sum(module._busy_and_stolen_ticks())

        def all_busy() -> float:
            ticks = sum(module._busy_and_stolen_ticks()) - before
            return (
                100.0 * float(ticks) / ((time.monotonic() - began) * (os.cpu_count() or 1) * os.sysconf("SC_CLK_TCK"))
            )

        return module, all_busy

    def test_own_children_do_not_count(self) -> None:
        module, all_busy = self.measured()
        meter, before = module.LoadMeter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        with subprocess.Popen(self.SPIN) as process:
            while process.poll() is None:
                time.sleep(0.2)
                meter.sample()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        share = 100 * own / ((time.monotonic() - began) * (os.cpu_count() or 1))
        assert meter.others() <= all_busy() - share + 10

    @pytest.mark.parametrize("program", [SPIN, ("sh", "-c", "timeout 1.5 sh -c 'while :; do /bin/true; done'")])
    def test_others_do_and_only_once(self, program: tuple[str, ...]) -> None:
        if shutil.which("setsid") is None or shutil.which("timeout") is None:
            pytest.skip("needs setsid and timeout")
        # Forked off, and so no descendant of this process: what it uses is another's.
        subprocess.run(["setsid", "-f", *program], check=True)
        time.sleep(0.2)
        module, all_busy = self.measured()
        meter = module.LoadMeter()
        for _ in range(5):
            time.sleep(0.2)
            meter.sample()
        others = meter.others()
        assert others >= 5
        assert others <= all_busy() + 10
        time.sleep(0.6)
