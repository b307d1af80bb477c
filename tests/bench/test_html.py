"""The page of plots and tables: whole, alone, and drawn without a complaint in a browser."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from osu_like_bench import charts
from osu_like_bench.__main__ import main

VOID = {"meta", "input", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """The elements of a page: their text by tag, the cells of its table, and what each refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.references: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        self.texts.setdefault(tag, [])
        if tag not in VOID:
            self.open.append(tag)
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


def collective(**medians: list[float]) -> dict[str, Any]:
    results = [
        {
            **{"collective": "allreduce", "size": 1024 << i, "ranks": 2, "contender": name, "algorithm": "ring"},
            **{"codec": None, "median_us": us, "busbw": 1 / us, "ratio": 4.0, "error": 1e-3, "wrong": int(us > 900)},
        }
        for name, taken in medians.items()
        for i, us in enumerate(taken)
    ]
    run = {
        "command": "bench --data '</script><b>&.npy'",
        "cpu": "Some CPU",
        "ranks": 2,
        "compcoll": "1",
        "commit": "abc",
    }
    return {"schema": 1, "kind": "collective", "run": run, "results": results}


RUN = collective(native=[10.0, 20.0, 1000.0], ring=[5.0, 40.0, 250.0])


def charts_of(page: Page) -> dict[str, Any]:
    return {chart["title"]: chart for chart in json.loads(page.texts["script"][0])}


def test_a_page_holds_all_figures_and_refers_to_nothing_else(tmp_path: Path) -> None:
    charts.write_page(tmp_path / "a.html", [("", RUN)], "median")
    text = (tmp_path / "a.html").read_text()
    page = Page(text)
    assert page.references == [] and "://" not in text and "url(" not in text and "@import" not in text
    assert page.texts["h1"] == ["osu_like_bench: allreduce, 2 ranks, Some CPU, compcoll 1"]
    assert page.texts["code"] == [RUN["run"]["command"]] and "abc" in page.texts["dd"]
    heads, cells = page.texts["th"], page.texts["td"]
    rows = [dict(zip(heads, cells[i : i + len(heads)], strict=True)) for i in range(0, len(cells), len(heads))]
    shown = [(row["contender"], int(row["size"]), float(row["median_us"]), row["wrong"]) for row in rows]
    assert shown == [(r["contender"], r["size"], r["median_us"], str(r["wrong"])) for r in RUN["results"]]
    drawn = charts_of(page)
    ring = {series["name"]: series["points"] for series in drawn["speed-up over native"]["series"]}["ring"]
    assert [point[:2] for point in ring] == [[1024, 2.0], [2048, 0.5], [4096, 4.0]]
    assert ring[0][2] == "2  (ring, ratio 4.00, error 1.0e-03)"


def test_runs_are_drawn_together_and_told_one_by_one(tmp_path: Path) -> None:
    steps = [
        {"contender": name, "parameters": 9, "median_ms": ms, "wrong": 0} for name, ms in (("gloo", 4.0), ("x", 2.0))
    ]
    ddp = {"schema": 1, "kind": "ddp", "run": {"cpu": "Other"}, "results": steps}
    for name, content in (("one", RUN), ("two", RUN), ("three", ddp)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    files = [str(tmp_path / f"{name}.json") for name in ("one", "two", "three")]
    with pytest.raises(SystemExit) as end:
        main(["plot", *files, "-o", str(tmp_path / "all.html")])
    assert end.value.code == 0
    page = Page((tmp_path / "all.html").read_text())
    assert page.texts["h2"] == ["one", "two", "three"]
    drawn = charts_of(page)
    names = [series["name"] for series in drawn["median latency (µs)"]["series"]]
    assert names == ["one: native", "one: ring", "two: native", "two: ring"]
    assert drawn["median step (ms)"]["labels"] == ["gloo", "x"]


@pytest.mark.parametrize("words", ["codecs --codec cast --size 4K -i 3", "selection -m 4K -i 3"])
def test_commands_write_pages(words: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--html", str(tmp_path / "a.html")])
    assert end.value.code == 0
    drawn = charts_of(Page((tmp_path / "a.html").read_text()))
    assert drawn and all(series["points"] for chart in drawn.values() for series in chart["series"])


USED = """<script>
const told = document.querySelector("svg");
const box = told.getBoundingClientRect();
told.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 0.2 * box.width, clientY: box.top + 99 }));
document.body.dataset.told = document.querySelector("output").textContent;
document.querySelector("#switches input").click();
document.body.dataset.lines = document.querySelector("svg").querySelectorAll("polyline").length;
</script>
"""


def in_chromium(*words: str) -> subprocess.CompletedProcess[str]:
    """What it says, once it runs at all: on a machine that is busy it may not start."""
    for _ in range(3):
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(["chromium", *words], capture_output=True, text=True, timeout=35)
            if "</html>" in done.stdout:
                return done
    pytest.skip("Chromium does not run here")


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium on PATH")
def test_in_a_browser_it_draws_tells_and_switches(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    charts.write_page(path, [("", RUN)], "median")
    path.write_text(path.read_text().replace("</body>", f"{USED}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=1000"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    done = in_chromium(*options, path.as_uri())
    assert "CONSOLE" not in done.stderr, done.stderr
    drawn = Page(done.stdout)
    assert drawn.texts["figcaption"] == ["median latency (µs)", "speed-up over native", "bus bandwidth (GB/s)"]
    assert drawn.texts["label"] == ["native", "ring"]
    assert 'data-lines="1"' in done.stdout  # of two: one was switched off
    assert "1 KiB\nnative: 10  (ring, ratio 4.00, error 1.0e-03)\nring: 5" in done.stdout
