"""The site in a browser: every page loads without an error, keyboards and screen readers can use it, in light and dark,
and the form of choose.md answers as the command does.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shlex
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from compcoll.__main__ import main as compcoll_main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]
"""For root, and for containers with little shared memory."""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-all does")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def address(built_site: Path) -> Iterator[str]:
    """Where the site is served."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built_site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Tab:
    """A tab of the browser, and what went wrong in it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.page = browser.new_context(viewport={"width": 1280, "height": 900}, **options).new_page()
        self.faults: list[str] = []
        self.page.on("console", lambda said: self._add(said.text) if said.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self._add(str(error)))
        self.page.on("requestfailed", lambda request: self._add(f"{request.url} failed: {request.failure}"))
        self.page.on("response", lambda reply: self._add(f"{reply.url}: {reply.status}") if reply.status >= 400 else 0)

    def _add(self, fault: str) -> None:
        self.faults.append(f"{self.page.url}: {fault}")


MARK_COLOURS = """seen => {
  const opaque = colour => !/^rgba\\(.*, 0(\\.\\d+)?\\)$/.test(colour);
  const looks = element => {
    const {color, fontSize, fontWeight, opacity} = getComputedStyle(element), behind = [];
    for (let each = element; each; each = each.parentElement) {
      behind.push(getComputedStyle(each).backgroundColor);
      if (opaque(behind.at(-1))) break;
    }
    return [color, fontSize, fontWeight, opacity, ...behind].join(" ");
  };
  document.querySelectorAll("[data-look]").forEach(element => element.removeAttribute("data-look"));
  const known = new Set(seen);
  for (const element of document.body.querySelectorAll("*")) {
    const text = [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!text || !element.checkVisibility()) continue;
    const look = looks(element);
    if (known.has(look)) continue;
    known.add(look);
    element.setAttribute("data-look", "");
  }
  return [...known];
}"""
"""Marks an element for each new combination of colours and font. Contrast is the slowest of axe's rules by far."""


class Axe:
    """Axe's findings on pages, and the looks whose contrast it has seen."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.found: list[str] = []
        self.looks: list[str] = []

    def look_at(self, page: Any) -> None:
        """Apply all rules in the light scheme; in the dark one only colours differ."""
        page.evaluate(self.script)
        self._run(page, "document", {"rules": {"color-contrast": {"enabled": False}}})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            known = len(self.looks)
            self.looks = page.evaluate(MARK_COLOURS, self.looks)
            if len(self.looks) > known:
                self._run(page, '"[data-look]"', {"runOnly": ["color-contrast"]}, f"{scheme}: ")

    def _run(self, page: Any, where: str, options: dict[str, Any], scheme: str = "") -> None:
        options = {"resultTypes": ["violations"], **options}
        for found in page.evaluate(f"options => axe.run({where}, options)", options)["violations"]:
            for node in found["nodes"]:
                text = f"{node['html'][:150]}: {node['failureSummary'][:250]}"
                self.found.append(f"{scheme}{page.url}: {found['id']}: {text}")


@pytest.fixture
def axe() -> Axe:
    package = pytest.importorskip("axe_playwright_python", reason="axe is not installed: make test-all installs it")
    return Axe(Path(package.__file__).with_name("axe.min.js").read_text())


def test_every_page_is_whole_and_accessible(axe: Axe, browser: Any, address: str, built_site: Path) -> None:
    tab = Tab(browser, color_scheme="light", reduced_motion="reduce")
    pages = sorted(built_site.rglob("*.html"))
    assert len(pages) > 50
    for path in pages:
        tab.page.emulate_media(color_scheme="light")
        tab.page.goto(f"{address}/{path.relative_to(built_site)}")
        axe.look_at(tab.page)
    assert tab.faults == []
    assert axe.found == []
    assert len(axe.looks) > 20


def test_faults_of_a_page_are_found(axe: Axe, browser: Any, address: str) -> None:
    """The test above can fail."""
    tab = Tab(browser, color_scheme="light")
    tab.page.goto(f"{address}/choose.html")
    faint = "body[data-theme] .chooser-answer { color: #777; background: #888 }"
    dark = "@media (prefers-color-scheme: dark) { body .chooser-figures dt { color: #222; background: #111 } }"
    tab.page.add_style_tag(content=faint + dark)
    tab.page.evaluate("document.querySelector('label[for=choose-link]').remove()")
    tab.page.evaluate("document.querySelector('article').append(new Image()); console.error('told')")
    tab.page.evaluate("fetch('/nothing')")
    axe.look_at(tab.page)
    assert {re.sub(r"http\S+: ", "", found).split(": <")[0] for found in axe.found} == {
        "select-name",
        "image-alt",
        "light: color-contrast",
        "dark: color-contrast",
    }
    assert any("/nothing: 404" in fault for fault in tab.faults)
    assert any("told" in fault for fault in tab.faults)
    tab.page.context.close()


@pytest.fixture
def chooser(browser: Any, address: str) -> Iterator[Tab]:
    tab = Tab(browser)
    tab.page.goto(f"{address}/choose.html")
    yield tab
    assert tab.faults == []
    tab.page.context.close()


def figures_of(page: Any) -> dict[str, str]:
    """The figures that the form shows, by their names."""
    names, values = page.locator(".chooser-figures dt"), page.locator(".chooser-figures dd")
    return dict(zip(names.all_inner_texts(), values.all_inner_texts(), strict=True))


def told_by(command: str) -> tuple[str, dict[str, str]]:
    """What the command answers, in the form's words."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert compcoll_main(shlex.split(command.replace("\\\n", ""))[3:]) == 0
    text = said.getvalue()
    rows = [re.split(r"\s{2,}", line.replace("<- auto", "").strip()) for line in text.splitlines()]
    native = next(row for row in rows if row[0] == "native")
    (line,) = [line for line in text.splitlines() if line.endswith("<- auto")]
    algorithm, codec, time, gain, _, error = re.split(r"\s{2,}", line.removesuffix("<- auto").strip())
    (ranks,) = re.findall(r"on (\d+) ranks", text)
    figures = {"Ranks": ranks, "MPI's own, predicted": native[2]}
    if codec == "-":
        assert algorithm == "native"
        return "Uncompressed", figures
    answer = f"{codec} by {algorithm}: predicted {gain.replace('×', ' ×')} faster than MPI's own allreduce."
    return answer, figures | {"compcoll, predicted": time, "Error, estimated": error}


def set_form(page: Any, place: dict[str, int]) -> None:
    for name, value in place.items():
        field = page.locator(f"#choose-{name}")
        if field.evaluate("field => field.type") == "range":
            field.fill(str(value))
        else:
            field.select_option(str(value))


def test_the_form_answers_as_the_command_does(chooser: Tab) -> None:
    page = chooser.page
    settings = json.loads(page.locator("#chooser-table").text_content())["settings"]
    dice = random.Random(0)
    seen = set()
    for _ in range(60):
        set_form(page, {name: dice.randrange(len(values)) for name, values in settings.items()})
        answer, figures = told_by(page.locator(".chooser-command").inner_text())
        shown = page.locator(".chooser-answer").inner_text()
        assert (shown.partition(":")[0], figures_of(page)) == (answer.partition(":")[0], figures)
        assert shown == answer or answer == "Uncompressed"
        assert page.locator(".chooser-call").inner_text().startswith('compcoll.allreduce(x, codec="auto", tolerance=')
        seen.add(answer)
    assert "Uncompressed" in seen and len(seen) > 20


def test_the_keyboard_changes_the_answer(chooser: Tab) -> None:
    page = chooser.page
    before = page.locator(".chooser-answer").inner_text()
    page.locator("#choose-bytes").focus()
    page.keyboard.press("Home")
    assert page.locator("#choose-bytes").get_attribute("aria-valuetext") == "64 KiB"
    assert page.locator(".chooser-answer").inner_text() != before
    reached = []
    for _ in range(5):
        reached.append(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    assert reached == [f"choose-{name}" for name in ("bytes", "link", "nodes", "per-node", "error")]


def test_without_javascript_there_are_tables(browser: Any, address: str) -> None:
    tab = Tab(browser, java_script_enabled=False)
    tab.page.goto(f"{address}/choose.html")
    assert not tab.page.locator("#chooser").is_visible()
    tab.page.locator("details summary").nth(1).click()
    assert tab.page.locator("details table").nth(4).is_visible()
    assert "int8" in tab.page.locator("details").nth(1).inner_text()
    assert tab.faults == []
    tab.page.context.close()


def test_search_finds_a_page(browser: Any, address: str) -> None:
    tab = Tab(browser)
    tab.page.goto(f"{address}/search.html?q=handshake")
    tab.page.locator("#search-results li a").first.wait_for()
    assert tab.faults == []
    tab.page.context.close()
