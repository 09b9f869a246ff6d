"""The pictures and the tables of README.md have the figures of the recorded runs."""

import json
import re
from pathlib import Path

from PIL import Image

from benchmarks.front_page import MEASURE, RESULTS, SECONDS, THEMES, WORKS, main, measurement
from benchmarks.quality.results import Results
from benchmarks.quality.speedup import pairs
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
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for seed, file in enumerate(("", "-seed1", "-seed2")):
        runs = json.loads((RESULTS / f"quality-{SECONDS}s{file}.json").read_text())["runs"]
        for arm in ("dense", "routed"):
            for look in runs[f"{arm}-s{seed}-{SECONDS}s"]["snapshots"]:
                for way, figures in look["samples"].items():
                    for name in ("FD-EffLite0", "FD-EffLite0 few", "FD-EffLite0 test"):
                        if name in figures:
                            found.setdefault((arm, look["at"], way, name), []).append(figures[name])

    def means(seeds: int, way: str, name: str, *looks: tuple[str, str]) -> list[str]:
        values = [found[arm, at, way, name] for arm, at in looks]
        assert [len(one) for one in values] == [seeds] * len(looks)
        return [f"{sum(one) / seeds:.1f}" for one in values]

    ends = ("dense", "end"), ("routed", "end")
    every = (*ends, ("routed", "equal-steps"))
    for seeds, name in ((3, "FD-EffLite0"), (2, "FD-EffLite0 test")):
        dense, time, steps = means(seeds, "unguided", name, *every)
        assert f"| {seeds} | {dense} | **{time}** | {steps} |" in README
    # guided, the first seed has 5,000 samples, which is few of the others'
    dense, time = means(3, "cfg", "FD-EffLite0 few", *ends)
    assert f"| 3 | {dense} | **{time}** | not measured |" in README


def test_the_words_beside_the_picture_have_its_speed_up() -> None:
    results = Results(RESULTS / "none", sorted(RESULTS.glob(f"quality-{SECONDS}s*.json")))
    found = sorted(pair.at_looks()[SECONDS] for pair in pairs(results) if pair.measure == MEASURE)
    assert len(found) == 3
    words = f"{found[0]:.2f} to {found[-1]:.2f} times sooner"
    for page in ("README.md", "docs/results.md"):
        assert words in (ROOT / page).read_text().replace("\n", " ")
