"""The browser of the page tests sees what a reader would: errors, loads, sizes, colours, clicks, drags, copies."""

from pathlib import Path

import pytest
from PIL import Image

from tests import browser as harness
from tests.browser import PHONE, Browser

PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>:root {{ color-scheme: light dark }} body {{ margin: 0; height: 2000px; background: Canvas }}</style>
<input type="range" min="0" max="100" value="10" style="width: 300px"><button>copy</button><p>no script</p>{more}
<script>
document.querySelector('p').textContent = location.hash + innerWidth;
document.querySelector('button').onclick = () => navigator.clipboard.writeText('copied ' + performance.now());
</script>"""


@pytest.fixture
def page(tmp_path: Path):
    def write(more: str = "") -> Path:
        path = tmp_path / "page.html"
        path.write_text(PAGE.format(more=more))
        return path

    return write


def test_it_reports_errors_and_loads(browser: Browser, page) -> None:
    browser.open(page())
    assert (browser.errors(), browser.resources()) == ([], [])
    browser.open(page("<script>throw Error('thrown here')</script>"))
    (error,) = browser.errors()
    assert "thrown here" in error
    browser.open(page('<img src="https://example.org/x.png">'))
    assert browser.resources() == ["https://example.org/x.png"]
    assert len(browser.errors()) == 1
    browser.open(page('<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">'))
    assert browser.resources() == []


def test_it_sets_width_colours_fragment_and_scripts(browser: Browser, page, tmp_path: Path) -> None:
    path = page()
    text = "return document.querySelector('p').textContent"
    browser.open(path, width=PHONE, fragment="a=1")
    assert browser.run(text) == f"#a=1{PHONE}"
    assert browser.overflow() == 0
    browser.open(page('<div style="width: 500px">wide</div>'), width=PHONE)
    assert browser.overflow() >= 500 - PHONE
    browser.open(path, scripts=False)
    assert browser.run(text) == "no script"
    corners = {}
    for dark in (False, True):
        browser.open(path, width=700, height=300, dark=dark)
        with Image.open(browser.screenshot(tmp_path / "shot.png")) as shot:
            assert shot.size == (700, 2000)
            corners[dark] = shot.convert("L").getpixel((690, 1990))
        with Image.open(browser.screenshot(tmp_path / "shot.png", whole=False)) as shot:
            assert shot.size == (700, 300)
    assert corners[False] == 255
    assert corners[True] < 64


def test_it_drags_clicks_and_copies(browser: Browser, page) -> None:
    browser.open(page())
    browser.drag("input", 0.7)
    assert abs(float(browser.run("return document.querySelector('input').value")) - 70) <= 1
    browser.click("button")
    assert browser.clipboard().startswith("copied ")


def test_without_a_chromium_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for variable in ("TREAD_CHROMIUM", "TREAD_CHROMEDRIVER"):
        monkeypatch.delenv(variable, raising=False)
    assert str(harness.missing()).startswith("no chromium and no chromedriver")
