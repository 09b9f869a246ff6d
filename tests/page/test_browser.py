"""Reports in a browser: no errors, nothing loaded, no scrolling sideways; sliders, values and switches; no script."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.browser import PHONE, Browser
from tests.page.conftest import write_run
from tread.page.write import write_report

pytestmark = pytest.mark.filterwarnings("ignore")
SHOWN = "return [...document.querySelectorAll('%s .frame')].filter(f => f.offsetParent).map(f => +f.dataset.step)"
GALLERY = "#pictures-over-time .gallery"


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both runs side by side."""
    return write_report([runs / "routed", runs / "dense"], tmp_path_factory.mktemp("page") / "page.html")


@pytest.mark.parametrize("width", [1280, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_every_screen(browser: Browser, page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    assert (browser.errors(), browser.resources(), browser.overflow()) == ([], [], 0)
    with Image.open(browser.screenshot(tmp_path / "shot.png")) as shot:
        (corner,) = shot.convert("L").crop((2, 2, 3, 3)).tobytes()
    assert corner < 64 if dark else corner == 255
    ids = browser.run("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    clipped = """return [...document.querySelectorAll('svg text')].filter(text => {
        const inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
        return inner.left < outer.left - 1 || inner.right > outer.right + 1;
    }).map(text => text.textContent)"""
    assert browser.run(clipped) == []


def test_one_slider_moves_the_pictures_of_all_runs(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.run(SHOWN % GALLERY) == [16, 16]
    browser.drag(f"{GALLERY} input", 0.0)
    assert browser.run(SHOWN % GALLERY) == [4, 4]
    assert browser.run(f"return document.querySelector('{GALLERY} output').textContent") == "step 4"
    sizes = f"return [...document.querySelectorAll('{GALLERY} .now img')].map(i => i.complete && i.naturalWidth)"
    assert all(browser.run(sizes)), "they are pictures"


def test_masks_begin_at_a_routed_step(browser: Browser, page: Path) -> None:
    browser.open(page)
    first = browser.run(SHOWN % "#tokens-kept .route .gallery")
    assert len(first) == 2  # one for each route
    assert all(4 < step <= 12 for step in first), "after the warm-up and before the cool-down"


def test_values_are_shown_under_the_pointer(browser: Browser, page: Path) -> None:
    browser.open(page)
    moved = """const svg = document.querySelector('#chart-val-loss svg'), box = svg.getBoundingClientRect();
        const clientX = box.left + box.width * arguments[0];
        svg.dispatchEvent(new PointerEvent('pointermove', {clientX, bubbles: true}));
        return document.querySelector('#chart-val-loss .readout').hidden
            ? null : [...document.querySelectorAll('#chart-val-loss .readout > *')].map(e => e.textContent)"""
    numbers = json.loads(browser.run("return document.querySelector('#chart-val-loss script').textContent"))
    routed, dense = (f"{line['points'][0][1]:.4g}" for line in numbers["lines"])
    left = (numbers["box"][0] + 2) / 420
    assert browser.run(moved, left) == ["4 steps", f"routed: {routed}", f"dense: {dense}"]
    assert browser.run(moved, 0.0) is None


def test_a_run_can_be_hidden(browser: Browser, page: Path) -> None:
    browser.open(page)
    visible = """return [...document.querySelectorAll('#chart-loss .line')]
        .filter(line => getComputedStyle(line).display != 'none').length"""
    assert browser.run(visible) == 2
    browser.click("[data-switch='1'] input")
    assert browser.run(visible) == 1
    assert browser.run(SHOWN % GALLERY) == [16]
    browser.click("[data-switch='1'] input")
    assert browser.run(visible) == 2


def test_without_scripts_everything_is_there(browser: Browser, page: Path) -> None:
    browser.open(page, scripts=False)
    assert browser.errors() == []
    assert browser.overflow() == 0
    assert browser.run(SHOWN % GALLERY) == [4, 8, 12, 16] * 2
    count = "return [document.querySelectorAll('svg .curve').length > 8, document.querySelectorAll('input').length]"
    assert browser.run(count) == [True, 0]


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror=\"document.title='hit'\">"
    lines = [{"step": 1, "loss": 1.0, evil: 1.0}, {"step": 2, "loss": 0.5, evil: 2.0}]
    folders = [write_run(tmp_path / name, lines, data={evil: evil}) for name in (evil.replace("/", ""), "other")]
    browser.open(write_report(folders, tmp_path / "page.html"))
    assert browser.run("return document.title") != "hit"
    assert (browser.errors(), browser.run("return document.images.length")) == ([], 0)
