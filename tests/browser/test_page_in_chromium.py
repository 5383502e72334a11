"""The page about a report in headless Chromium: by keyboard, by mouse, light, dark, narrow, printed, without script."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.models import HOSTILE, REASON, report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed; it is in mhc-compile[test]")
Keys = webdriver.Keys

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="Chromium or chromedriver is not installed: apt-get install chromium chromium-driver",
)
# What a person reads needs this contrast with its background (WCAG 2, level AA).
CONTRAST = 4.5
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# The visible texts with less contrast than wanted, each with its contrast, and how many texts there are.
_CONTRASTS = """
const rgb = (color) => color.match(/[\\d.]+/g).map(Number);
const light = (color) => rgb(color).slice(0, 3).map((c) => c / 255)
  .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const opaque = (color) => rgb(color).length < 4 || rgb(color)[3] === 1;
const back = (e) => {
  for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (opaque(c)) return c; }
  return "rgb(255, 255, 255)";
};
const texts = [...document.body.querySelectorAll("*")].filter((e) => !["SCRIPT", "STYLE"].includes(e.tagName)
  && e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
const poor = [];
for (const e of texts) {
  const [a, b] = [light(getComputedStyle(e).color), light(back(e))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < arguments[0]) poor.push([e.textContent.trim().slice(0, 40), ratio]);
}
return [poor, texts.length];
"""
# What is visible of the heads of a layer's sites.
_HEADS = """
const heads = document.getElementById(arguments[0]).querySelectorAll(".site h4");
return [...heads].filter((e) => e.checkVisibility()).map((e) => e.innerText);
"""
# Of a picture: the mean brightness of its pixels, the share of the most frequent colour, and how many colours it has.
_PIXELS = """
const done = arguments[1], image = new Image();
image.onload = () => {
  const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer), counts = new Map();
  let sum = 0;
  for (const p of pixels) {
    counts.set(p, (counts.get(p) || 0) + 1);
    sum += ((p & 255) + (p >> 8 & 255) + (p >> 16 & 255)) / 3;
  }
  done([sum / pixels.length, Math.max(...counts.values()) / pixels.length, counts.size]);
};
image.src = "data:image/png;base64," + arguments[0];
"""


class Browser:
    """Chromium with one page about a model."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver = driver
        self.folder = folder

    def open(self, depth: int) -> None:
        path = self.folder / f"{depth}.html"
        path.write_text(report(depth).html(), encoding="utf-8")
        self.driver.get("about:blank")  # the same address again would keep what is open
        self.driver.get(path.as_uri())

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def one(self, selector: str) -> Any:
        (found,) = self.all(selector)
        return found

    def shown(self, selector: str) -> list[Any]:
        return [element for element in self.all(selector) if element.is_displayed()]

    @property
    def focus(self) -> Any:
        return self.driver.switch_to.active_element

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def emulate(self, scheme: str, media: str = "") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})

    def is_in_view(self, element: Any) -> bool:
        place = "const box = arguments[0].getBoundingClientRect(); return [box.left, box.top, innerHeight - box.bottom]"
        return all(distance >= 0 for distance in self.driver.execute_script(place, element))

    def pixels(self) -> tuple[float, float, int]:
        """Of a screenshot, in a tab of its own: brightness, share of the most frequent colour, number of colours."""
        picture, tab = self.driver.get_screenshot_as_base64(), self.driver.current_window_handle
        self.driver.switch_to.new_window("tab")
        found = self.driver.execute_async_script(_PIXELS, picture)
        self.driver.close()
        self.driver.switch_to.window(tab)
        return tuple(found)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    try:
        yield Browser(driver, tmp_path_factory.mktemp("pages"))
    finally:
        driver.quit()


@pytest.fixture(autouse=True)
def _as_it_begins(browser: Browser) -> None:
    browser.emulate("light")
    browser.driver.set_window_size(1200, 900)


def summaries(browser: Browser) -> list[Any]:
    return browser.all("details.layer > summary")


def test_nothing_but_the_page_is_loaded(browser: Browser) -> None:
    browser.driver.get_log("performance")
    browser.open(60)
    for button in browser.all("button[data-open=yes]"):
        button.click()
    sent = [
        one["message"]
        for one in browser.driver.get_log("performance")
        if 'Network.requestWillBeSent"' in one["message"]
    ]
    assert len(sent) == 1, sent
    assert "60.html" in sent[0]
    assert browser.driver.get_log("browser") == []
    assert browser.driver.title.startswith("Hyper-connections of the model"), "a line of the program was run"
    assert HOSTILE in browser.one("body").text


def test_sixty_layers_by_keyboard(browser: Browser) -> None:
    browser.open(60)
    browser.press(Keys.TAB)
    assert browser.focus.text == "Go to the layers"
    assert browser.is_in_view(browser.focus)
    browser.press(Keys.ENTER)
    assert browser.is_in_view(browser.one("#layers-title"))
    names = []
    for _ in range(4):
        browser.press(Keys.TAB)
        names.append(browser.focus.get_attribute("id") or browser.focus.text.partition("\n")[0])
    assert names == ["filter", "Open all", "Close all", "layers.0"]
    outline = browser.driver.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"

    inside = "#layer-layers\\.0 .site"
    assert browser.shown(inside) == []
    browser.press(Keys.ENTER)
    assert len(browser.shown(inside)) == 4
    browser.press(Keys.ARROW_LEFT)
    assert browser.shown(inside) == []
    for number in range(1, 60):
        browser.press(Keys.ARROW_DOWN)
        assert browser.focus.text.startswith(f"layers.{number}\n") or browser.focus.text.startswith(f"layers.{number} ")
    assert browser.is_in_view(browser.focus)
    browser.press(Keys.ARROW_RIGHT)
    assert len(browser.shown("#layer-layers\\.59 .site")) == 4
    browser.press(Keys.HOME)
    assert browser.focus.text.startswith("layers.0")


def test_the_filter(browser: Browser) -> None:
    browser.open(60)
    browser.press("/")
    assert browser.focus.get_attribute("id") == "filter"
    browser.press("declined")
    assert [one.text.partition("\n")[0] for one in browser.shown("details.layer > summary")] == ["layers.2"]
    assert browser.one("#count").text == "1 of 60 layers"
    browser.press(Keys.ESCAPE)
    assert len(browser.shown("details.layer > summary")) == 60
    assert browser.one("#count").text == ""


@pytest.mark.slow
def test_every_layer_opens_by_a_click(browser: Browser) -> None:
    browser.open(60)
    assert browser.shown("details.layer .site") == []
    for number, summary in enumerate(summaries(browser)):
        summary.click()
        heads = browser.driver.execute_script(_HEADS, f"layer-layers.{number}")
        assert len(heads) == 4
        assert all("rewritten" in head or "declined" in head for head in heads)
    browser.one("button[data-open=no]").click()
    assert browser.shown("details.layer .site") == []
    browser.one("button[data-open=yes]").click()
    assert len(browser.shown("details.layer .site")) == 240


def test_a_loss_leads_to_its_layer(browser: Browser) -> None:
    browser.open(60)
    browser.all(".losses a")[0].click()
    layer = browser.one("#layer-layers\\.2")
    assert layer.get_attribute("open")
    assert REASON in layer.text
    assert browser.is_in_view(layer.find_element("css selector", "summary"))


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_a_site_leads_to_its_graph(browser: Browser, script: bool) -> None:
    """Links and details work without JavaScript; the tools, which do not, are not shown then."""
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
    try:
        browser.open(60)
        assert browser.one("#tools").is_displayed() is script
        summaries(browser)[5].click()
        assert browser.shown(".graphs pre") == []
        browser.all("#layer-layers\\.5 a")[1].click()
        before, after = browser.shown(".graphs pre")
        assert "in0: bf16[8192, 4, 4096]" in before.text
        assert after.text == "%0 = mhc.expand_combine(in0)"
        assert browser.is_in_view(after)
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def open_some(browser: Browser) -> None:
    for summary in [*summaries(browser)[:3], *browser.all(".graphs")]:
        browser.driver.execute_script("arguments[0].closest('details').open = true", summary)


@pytest.mark.parametrize("depth", [2, 60])
@pytest.mark.parametrize("width", [500, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(browser: Browser, scheme: str, width: int, depth: int) -> None:
    browser.emulate(scheme)
    browser.driver.set_window_size(width, 900)
    browser.open(depth)
    open_some(browser)
    poor, texts = browser.driver.execute_script(_CONTRASTS, CONTRAST)
    assert poor == []
    assert texts > 4 * depth
    widths = browser.driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1], "the page is wider than the window"
    brightness, background, colours = browser.pixels()
    assert brightness > 200 if scheme == "light" else brightness < 60
    # Text and lines are there, and most of the page is background.
    assert 0.5 < background < 0.98
    assert colours > 50


def test_sixty_layers_are_compact(browser: Browser) -> None:
    browser.open(60)
    heights = [summary.size["height"] for summary in summaries(browser)]
    assert max(heights) < 60
    assert sum(heights) / len(heights) < 48


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_prints_on_white(browser: Browser, scheme: str) -> None:
    browser.emulate(scheme, "print")
    browser.open(60)
    open_some(browser)
    assert browser.shown("#tools, .skip") == []
    assert browser.driver.execute_script(_CONTRASTS, CONTRAST)[0] == []
    assert browser.pixels()[0] > 200
    scrolled = "return [...document.querySelectorAll('.graphs pre')].every((e) => e.scrollWidth <= e.clientWidth)"
    assert browser.driver.execute_script(scrolled), "a part of a graph is not printed"


def test_what_is_open_is_printed(browser: Browser) -> None:
    def pages() -> int:
        pdf = base64.b64decode(browser.driver.execute_cdp_cmd("Page.printToPDF", {})["data"])
        assert pdf.startswith(b"%PDF")
        return pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page/")

    browser.open(60)
    closed = pages()
    browser.one("button[data-open=yes]").click()
    assert 0 < closed < 10 < pages()
