"""The report of a tuning: what it says, and how it looks in a browser."""

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.autotune.tuned import FAST, SCRATCH, Law, gap_of, measurements, tune_cli
from tests.browser import PHONE, Browser
from tread.autotune.output.page import heat, write_page
from tread.autotune.output.text import named
from tread.autotune.sensitivity import HeatMap, gap, gaps_by_level, heat_maps
from tread.autotune.store import KINDS

pytestmark = pytest.mark.filterwarnings("ignore")


def figures(depth: int = 12) -> dict[str, Any]:
    """Measurements and a conclusion in which every number is known."""
    names = [f"{start}..{end}@{ratio:g}" for ratio in (0.25, 0.5) for start in (2, 4, 6) for end in (5, 7, 9)]
    names = [name for name in names if int(name[0]) < int(name[3])]
    losses = {name: [[1.0, 1 + 0.001 * (place + 1) * (n + 1)] for place in range(4)] for n, name in enumerate(names)}
    several = "2..5@0.25 6..9@0.5"
    losses[several] = [[1.0, 1.05]] * 4
    front = [
        {"plan": several, "seconds": 0.7, "speedup": 1.43, "gap": 0.06},
        {"plan": "2..7@0.5", "seconds": 0.8, "speedup": 1.25, "gap": 0.03},
        {"plan": "4..5@0.25", "seconds": 0.95, "speedup": 1.05, "gap": 0.01},
    ]
    finalists = [
        one
        | {"timed_speedup": 1.2 if place else None, "whole_gap": 0.02 if place else None, "rejected": not place}
        | {"pairs": [{"start": 0, "dense": 0.96, "routed": 0.8}] if place else []}
        for place, one in enumerate(front[:2])
    ]
    return {kind: {} for kind in KINDS} | {
        "losses": losses,
        "starts": [
            {"time": "2026-11-17T12:00", "device": "cpu", "command": "tread autotune '<x>'", "versions": {"torch": "2"}}
        ],
        "result": {
            "goal": "steps 1.2 times as fast as dense ones",
            "summary": "DiT of 12 layers <b>",
            "dense_seconds": 1.0,
            "cost": {"fixed": 0.1, "window": 0.01, "layers": {"blocks": {"linear": 0.06, "square": 0.01}}, "error": 0},
            "timed": {
                "dense": {"predicted": 1.0, "seconds": 0.99, "rounds": [0.99, 1.03]},
                "0..9@0.5": {"predicted": 1, "seconds": 1, "rounds": [1]},
            },
            "measured": len(names), "windows": names, "levels": 4,
            "rules": {"depth": depth, "sentences": ["no first layer", "no last layer"]},
            "front": front, "finalists": finalists, "chosen": "2..7@0.5",
            "verified": {
                "dense": {
                    "steps": 100, "expected_seconds": 60.0, "seconds": 66.6, "val_loss": 0.5, "against_dense": 0.0
                },
                several: {
                    "steps": 140, "expected_seconds": 59.4, "seconds": 63.0, "val_loss": 0.52, "against_dense": 0.04
                },
                "2..7@0.5": {
                    "steps": 120, "expected_seconds": 61.2, "seconds": None, "val_loss": None, "against_dense": None
                },
            },
            "tread_config": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 7}]},
            "command": "tread train c.yaml model.tread_config=x.json", "notes": ["a < b"],
        },
    }  # fmt: skip


def test_every_figure_is_in_the_page(tmp_path: Path) -> None:
    text = write_page(tmp_path, figures()).read_text()
    for words in (
        "0.5 over 2..7", "0.25 over 2..5, 0.5 over 6..9", "chosen", "rejected", "1.250", "3.00%", "not timed",
        "not measured", "+4.00%", "A &lt; b", "&lt;b&gt;", "tread autotune &#x27;&lt;x&gt;&#x27;", "no last layer",
        "990, 1030", "<td>960</td><td>800</td><td>1.200</td>", "<td>0.99</td><td>1.05</td><td>0.52000</td>",
        "<td>1.02</td><td>diverged</td>", "tread train c.yaml model.tread_config=x.json", "0.25 of the tokens dropped",
    ):  # fmt: skip
        assert words in text, words
    assert "<b>" not in text
    for number, finalist in enumerate(figures()["result"]["finalists"], start=1):
        assert f">{number}: {named(finalist['plan'])}</" in text
        assert (f">finalist {number}</text>" in text) == (finalist["plan"] in figures()["losses"])


def test_a_page_without_a_choice_says_so(tmp_path: Path) -> None:
    facts = figures()
    for name in ("chosen", "tread_config", "command"):
        del facts["result"][name]
    facts["result"]["notes"] = ["no plan within the rules reaches it."]
    text = write_page(tmp_path, facts).read_text()
    assert "<li>No plan within the rules reaches it.</li>" in text
    assert "No routes were chosen, for the reason above." in text
    assert "No routes were chosen" not in write_page(tmp_path, figures()).read_text()


def test_a_heat_map_has_each_window_in_its_cell() -> None:
    one = HeatMap(ratio=0.5, starts=(2, 4), ends=(5, 7), gaps={(2, 5): 0.01, (2, 7): 0.2, (4, 7): -0.001})
    drawn = heat(one, 0.2)
    titles = re.findall(r"<title>([^<]*)</title><rect x=\"(\d+)\" y=\"(\d+)\"[^>]*opacity:([\d.]+)", drawn)
    assert [title for title, *_ in titles] == [
        "0.5 over 2..5: 1.000%",
        "0.5 over 2..7: 20.000%",
        "0.5 over 4..7: -0.100%",
    ]
    (_, x0, y0, faint), (_, x1, y1, dark), (_, x2, y2, none) = titles
    assert y0 == y1 < y2
    assert x0 < x1 == x2
    assert float(none) < float(faint) < float(dark)


def test_gaps() -> None:
    losses = {"2..3@0.5": [[1.0, 1.5], [3.0, 3.5]], "2..4@0.25": [[1.0, 1.0]], "2..3@0.5 5..6@0.5": [[1.0, 9.0]]}
    assert gap(losses["2..3@0.5"]) == gap_of(losses["2..3@0.5"]) == 0.25
    assert gaps_by_level(losses["2..3@0.5"]) == pytest.approx([0.5, 1 / 6])
    first, second = heat_maps(losses)
    assert (first.ratio, first.starts, first.ends, first.gaps) == (0.25, (2,), (4,), {(2, 4): 0.0})
    assert (second.ratio, second.gaps) == (0.5, {(2, 3): 0.25})


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (PHONE, False)])
def test_the_page_fits_its_window_and_loads_nothing(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    path = write_page(tmp_path, figures(depth=57))
    browser.open(path, width=width, dark=dark)
    assert browser.errors() == []
    assert browser.resources() == []
    assert browser.overflow() == 0
    with Image.open(browser.screenshot(tmp_path / "page.png")) as shot:
        background = shot.convert("L").getpixel((2, 2))
    assert isinstance(background, int | float)
    assert (background < 64) == dark


def test_the_page_of_a_tuning(law: Law, browser: Browser, tmp_path: Path) -> None:
    """Without scripts too."""
    assert tune_cli(*SCRATCH, "--target-speedup", "1.1", "--edges", "3", *FAST) == 0
    folder = Path("autotune/train").resolve()
    browser.open(folder / "report.html", scripts=False)
    shown = browser.run("return document.body.innerText")
    result = measurements(folder)["result"]
    assert f"{result['finalists'][0]['speedup']:.3f}" in shown
    assert "Rules that every plan keeps to" in shown
    assert browser.overflow() == 0
