"""The page in headless Chromium, at the widths of a telephone and of a desk."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.page.conftest import ARRAYS

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("chromium"), reason="no chromium: apt-get install chromium"
    ),
]

ADDRESSES = ("/", "/run/0", "/run/0/step/300?tensor=model/embed", "/run/0/diff?a=200&b=300", "/no")
CONTRAST = """() => {
  const channel = (v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = (c) => .2126 * channel(c[0]) + .7152 * channel(c[1]) + .0722 * channel(c[2]);
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const c = rgb(getComputedStyle(node).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!own || !node.checkVisibility() || node.closest(".hidden, .skip, svg")) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) found.push(`${node.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""


@contextmanager
def served(*roots: Path) -> Iterator[str]:
    """``ckpt serve`` in a process of its own, as its address."""
    command = [sys.executable, "-um", "ckpt.cli.main", "serve", "--port", "0", "--interval", "0.3"]
    server = subprocess.Popen([*command, *map(str, roots)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().split()[-1].rstrip("/")
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0


@pytest.fixture
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=shutil.which("chromium"))
        yield opened
        opened.close()


def test_the_page_fits_a_telephone_and_a_desk_by_day_and_by_night(browser: Any, run: Path) -> None:
    with served(run, run.parent / "far") as address:
        for width, scheme in ((400, "light"), (400, "dark"), (1440, "light"), (1440, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            wrong: list[str] = []
            page.on("console", lambda reported, wrong=wrong: wrong.append(reported.text))
            page.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
            page.on(
                "request",
                lambda asked, wrong=wrong: (
                    None if asked.url.startswith(address) else wrong.append(asked.url)
                ),
            )
            for path in ADDRESSES:
                page.goto(address + path)
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, (path, width, wide)
                assert page.evaluate(CONTRAST) == [], (path, scheme)
                assert page.locator("h1").count() == 1
                assert page.locator("main").count() == 1
            assert [each for each in wrong if "404" not in each] == []
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert ground == {"light": "rgb(246, 247, 247)", "dark": "rgb(15, 21, 20)"}[scheme]
            page.close()


def test_a_new_step_appears_without_a_reload(browser: Any, run: Path) -> None:
    with served(run) as address:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{address}/run/0")
        page.wait_for_selector("#status[data-state=on]")
        page.evaluate("window.same = true")
        page.locator("#a").fill("17")
        write_checkpoint(open_backend(str(run)), 777, ARRAYS)
        page.wait_for_selector("#steps >> text=777", timeout=60_000)
        assert page.evaluate("window.same")
        assert page.locator("#a").input_value() == "17"


def test_the_keyboard_reaches_a_step(browser: Any, run: Path) -> None:
    with served(run) as address:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{address}/run/0")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "To the content"
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.closest('#steps') !== null"):
                break
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        page.keyboard.press("Enter")
        page.wait_for_url("**/step/*")
        assert page.locator("h1").inner_text().startswith("Step ")


def test_a_button_copies_a_command_and_removed_steps_stay_open(browser: Any, run: Path) -> None:
    with served(run) as address:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
        page.goto(f"{address}/run/0")
        page.wait_for_selector("#status[data-state=on]")
        button = page.locator("#steps button", has_text="restore").first
        command = button.get_attribute("data-copy")
        button.click()
        page.wait_for_selector("#steps >> text=copied")
        assert page.evaluate("navigator.clipboard.readText()") == command
        page.locator("#gone summary").click()
        assert page.locator("#gone-steps tbody tr").count() == 1
        write_checkpoint(open_backend(str(run)), 777, ARRAYS)
        page.wait_for_selector("#steps >> text=777", timeout=60_000)
        assert page.locator("#gone-steps tbody tr").is_visible()
