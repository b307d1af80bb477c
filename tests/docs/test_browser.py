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
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # for root, as in CI
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


def violations(page: Any, axe: str, rules: list[str]) -> Iterator[str]:
    """Yield what axe finds on a page: by these rules, or by all if none is named."""
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if rules:
        options["runOnly"] = {"type": "rule", "values": rules}
    page.evaluate(f"window.axe || (() => {{ {axe} }})()")
    for found in page.evaluate("options => axe.run(document, options)", options)["violations"]:
        for node in found["nodes"]:
            yield f"{page.url}: {found['id']}: {node['html'][:150]}: {node['failureSummary'][:250]}"


def test_every_page_is_whole_and_accessible(browser: Any, address: str, built_site: Path) -> None:
    """In the dark only colours differ."""
    package = pytest.importorskip("axe_playwright_python", reason="axe is not installed: make test-all installs it")
    axe = Path(package.__file__).with_name("axe.min.js").read_text()
    tab = Tab(browser, color_scheme="light", reduced_motion="reduce")
    pages = sorted(built_site.rglob("*.html"))
    assert len(pages) > 50
    found = []
    for path in pages:
        tab.page.emulate_media(color_scheme="light")
        tab.page.goto(f"{address}/{path.relative_to(built_site)}")
        found += violations(tab.page, axe, [])
        tab.page.emulate_media(color_scheme="dark")
        found += [f"dark: {each}" for each in violations(tab.page, axe, ["color-contrast", "link-in-text-block"])]
    assert tab.faults == []
    assert found == []


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
        assert compcoll_main(shlex.split(command)[3:]) == 0
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
