"""The pictures and the tables of README.md have the figures of the recorded runs."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.front_page import RESULTS, SECONDS, THEMES, WORKS, main, measurement, seconds_to
from tests.programs import ROOT

README = (ROOT / "README.md").read_text()


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    for theme in THEMES:
        for name in ("quality", "speed"):
            with Image.open(tmp_path / f"{name}-{theme.name}.png") as picture:
                assert f"#{bytes(picture.convert('RGB').getpixel((0, 0))).hex()}" == theme.background  # pyright: ignore[reportArgumentType]
    assert {f"docs/front/{path.name}" for path in tmp_path.iterdir()} <= set(
        re.findall(r'"(docs/front/[^"]+)"', README)
    )


def test_the_moment_a_curve_reaches_a_distance() -> None:
    assert seconds_to(5, [(1, 10), (4, 2.5)]) == pytest.approx(2)  # 10 / seconds
    assert seconds_to(10, [(1, 10), (4, 2.5)]) == pytest.approx(1)
    with pytest.raises(ValueError, match="does not reach 2"):
        seconds_to(2, [(1, 10), (4, 2.5)])


def test_the_speed_table_has_the_recorded_figures() -> None:
    rows = {work.row: measurement(work) for work in WORKS}
    table = README[README.index("## How fast?") : README.index("## Does it learn")]
    for row in ("flux-checkpointed", "flux", "sd3"):
        one = rows[row]
        assert f"| {one['dense']['median_ms']:.0f} ms | {one['routed']['median_ms']:.0f} ms |" in table
    for row in ("flux-checkpointed", "flux", "sd3", "wan-checkpointed", "dit-xl"):
        dense, routed = rows[row]["dense"]["median_ms"], rows[row]["routed"]["median_ms"]
        assert f"| {dense / routed:.2f} ({rows[row]['ideal']:.2f}) |" in table
    assert f"| {rows['dit-xl']['routed']['images_per_second']:,.0f} img/s |" in table


def test_the_quality_table_has_the_mean_of_the_recorded_seeds() -> None:
    found: dict[tuple[str, str, str], list[float]] = {}
    for seed, file in enumerate((f"quality-{SECONDS}s.json", f"quality-{SECONDS}s-seed1.json")):
        runs = json.loads((RESULTS / file).read_text())["runs"]
        for arm in ("dense", "routed"):
            for look in runs[f"{arm}-s{seed}-430s"]["snapshots"]:
                for way, figures in look["samples"].items():
                    # guided, the first seed has 5,000 samples, which is few of the second's
                    name = "FD-EffLite0" if way == "unguided" or figures["count"] == 5000 else "FD-EffLite0 few"
                    found.setdefault((arm, look["at"], way), []).append(figures[name])
    mean = {key: sum(values) / 2 for key, values in found.items() if len(values) == 2}
    dense, time, steps = (
        mean[arm, at, "unguided"] for arm, at in (("dense", "end"), ("routed", "end"), ("routed", "equal-steps"))
    )
    assert f"| 2 | {dense:.1f} | **{time:.1f}** | {steps:.1f} |" in README
    dense, routed = (mean[arm, "end", "cfg"] for arm in ("dense", "routed"))
    assert f"| 2 | {dense:.1f} | **{routed:.1f}** | not measured |" in README
