"""The speed-up to quality against power laws and against numpy's interpolation."""

from math import log
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality.__main__ import kept, main
from benchmarks.quality.pictures import save_speedups
from benchmarks.quality.results import Results
from benchmarks.quality.speedup import Pair, pairs, seconds_to, speedup_table
from tests.programs import ROOT

KEPT = ROOT / "benchmarks" / "results"


def pair_of(dense: list[tuple[float, float]], routed: list[tuple[float, float]]) -> Pair:
    words = "Frechet, to training images"
    return Pair(measure=words, figure="FD", seed=0, seconds=100, machines=1, dense=dense, routed=routed)


def test_the_moment_a_curve_reaches_a_distance() -> None:
    assert seconds_to(5, [(1, 10), (4, 2.5)]) == pytest.approx(2)  # 10 / seconds
    assert seconds_to(10, [(1, 10), (4, 2.5)]) == pytest.approx(1)
    assert seconds_to(3, [(1, 10), (2, 3), (4, 3), (8, 1)]) == pytest.approx(2)
    with pytest.raises(ValueError, match="does not reach 2"):
        seconds_to(2, [(1, 10), (4, 2.5)])


def test_power_laws_have_their_own_speed_up() -> None:
    """Dense has 200 / t, routed 300 / t^1.2: solved for t, the ratio of times is known at each distance."""
    times = 10.0, 22.0, 60.0, 100.0
    pair = pair_of([(t, 200 / t) for t in times], [(t, 300 / t**1.2) for t in times])
    assert pair.reached == pytest.approx((300 / 10**1.2, 2.0))
    for distance in (15.0, 6.0, 2.0):
        assert pair.at(distance) == pytest.approx((200 / distance) / (300 / distance) ** (1 / 1.2), rel=1e-5)
    curve = pair.curve()
    assert [seconds for seconds, _ in (curve[0], curve[-1])] == pytest.approx([200 / pair.reached[0], 100])
    for seconds, found in curve:
        assert found == pytest.approx(seconds / (300 * seconds / 200) ** (1 / 1.2), rel=1e-5)
    assert list(pair.at_looks()) == [22, 60, 100], "dense's first distance is one that routed was never seen at"


def test_arms_that_share_no_distance() -> None:
    pair = pair_of([(10, 9), (20, 8)], [(10, 7), (20, 6)])
    assert pair.curve() == []
    assert pair.at_looks() == {}


def test_the_recorded_seeds_by_other_means(tmp_path: Path) -> None:
    every = pairs(Results(tmp_path, sorted(KEPT.glob("quality-430s*.json"))))
    assert [(pair.figure, pair.seed) for pair in every] == [
        ("FD-EffLite0 few", 0),
        ("FD-EffLite0", 1),
        ("FD-EffLite0", 2),
        ("FD-EffLite0 test", 1),
        ("FD-EffLite0 test", 2),
        ("KD-EffLite0", 0),
        ("KD-EffLite0", 1),
        ("KD-EffLite0", 2),
        ("KD-EffLite0 test", 1),
        ("KD-EffLite0 test", 2),
    ]
    for pair in every:
        times, values = (np.log(one)[::-1] for one in zip(*pair.routed, strict=True))
        for (seconds, distance), found in zip(pair.dense[-2:], list(pair.at_looks().values())[-2:], strict=True):
            assert found == pytest.approx(seconds / np.exp(np.interp(log(distance), values, times)), rel=1e-5)


def test_the_table_and_its_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted(KEPT.glob("quality-430s*.json"))
    results = Results(tmp_path, paths)
    table = speedup_table(results)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    ends = {pair.seed: pair.at_looks()[430] for pair in pairs(results) if pair.figure.startswith("FD-EffLite0 test")}
    assert [line[-1] for line in lines if line[0] == "Frechet, to test images"] == [
        f"{ends[1]:.2f}",
        f"{ends[2]:.2f}",
        f"**{min(ends.values()):.2f} to {max(ends.values()):.2f}**",
    ]
    assert "two GPUs" not in table
    assert main(["speedup", *map(str, paths)]) == 0
    assert capsys.readouterr().out.strip() == table
    assert speedup_table(Results(tmp_path)) == "No pair was run."
    save_speedups(pairs(results), 1.35, tmp_path / "speedup.png")
    assert (tmp_path / "speedup.png").is_file()


def test_a_pair_of_two_machines_says_so(tmp_path: Path) -> None:
    results = Results(tmp_path, [KEPT / "quality-430s-seed1.json"])
    results.runs["dense-s1-430s"]["gpu"] = "another"
    assert "| 430 s, two GPUs |" in speedup_table(results)


def test_the_kept_results_are_found_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert KEPT / "quality-430s-seed2.json" in kept()
