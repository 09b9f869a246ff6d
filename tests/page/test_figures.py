"""The numbers in figures, against figures that were computed by hand or by torch."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.page.conftest import write_run
from tests.tiny.runs import make_session
from tread.page.curves import Clock, binned, curves, routed_spans
from tread.page.figure import Bar, Bars, Curves, Line, bounds
from tread.page.read import Run, read_run
from tread.page.sections import figures
from tread.page.speed import laps, speedups
from tread.page.svg import draw, log_ticks, number, ticks

pytestmark = pytest.mark.filterwarnings("ignore")


def figure(runs: list[Run], key: str) -> Curves:
    (found,) = [one for some in curves(runs).values() for one in some if one.key == key]
    return found


def speeds(kept: list[float], every: int, speed: dict[float, float]) -> list[dict[str, Any]]:
    """Lines of steps that keep these shares, with a line of speed every so many steps."""
    lines: list[dict[str, Any]] = []
    for step, share in enumerate(kept, start=1):
        lines.append({"step": step, "loss": 1.0, "tokens_kept": share})
        if step % every == 0:
            lines.append({"step": step, "images_per_second": speed[share]})
    return lines


def test_ticks_of_a_narrow_range_are_told_apart() -> None:
    """A loss that hardly moves: 2.3071 and 2.3073 are both 2.307 in four digits."""
    line = Line(name="run", run=0, points=[(0.0, 2.30705), (1.0, 2.30735)])
    figure = Curves(key="k", title="loss", x="steps", lines=[line])
    shown = re.findall(r'text-anchor="end">([0-9.]+)<', draw(figure))
    assert len(shown) == len(set(shown)) >= 2


def test_a_validation_before_the_first_step_takes_no_time(tmp_path: Path) -> None:
    lines = [{"step": 0, "val_loss": 1.0}, *speeds([1.0] * 5, 5, {1.0: 10})]
    assert Clock(read_run(write_run(tmp_path / "run", lines))).seconds[-1] == 5.0


def test_the_clock_adds_the_stretches(tmp_path: Path) -> None:
    """Ten samples a step: two stretches of 5 steps at 10 and 20 samples per second take 5 and 2.5 seconds."""
    lines = [*speeds([1.0] * 5 + [0.5] * 5, 5, {1.0: 10, 0.5: 20}), {"step": 10, "val_loss": 0.25}]
    run = read_run(write_run(tmp_path / "run", lines))
    clock = Clock(run)
    assert [clock.at(step) for step in (0, 1, 5, 7, 10, 11)] == [0, 1, 5, 6, 7.5, None]
    assert figure([run], "val-loss-by-time").lines[0].points == [(7.5, 0.25)]


def test_a_run_that_went_on_from_another_starts_its_clock_there(tmp_path: Path) -> None:
    lines = [{"step": 21, "loss": 1.0}, {"step": 22, "loss": 1.0}, {"step": 22, "images_per_second": 10.0}]
    clock = Clock(read_run(write_run(tmp_path / "run", lines)))
    assert (clock.at(20), clock.at(22)) == (0, 2)


def test_a_clock_leaves_out_speeds_of_nothing_and_steps_that_were_run_again(tmp_path: Path) -> None:
    speeds = [(2, 10.0), (4, 0.0), (3, 10.0), (2, 10.0), (5, 10.0)]
    lines = [{"step": 1, "loss": 1.0}, *({"step": step, "images_per_second": speed} for step, speed in speeds)]
    assert Clock(read_run(write_run(tmp_path / "run", lines))).steps == [0, 2, 3, 5]


def test_a_fine_tune_counts_the_samples_of_every_process(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 1.0}]
    path = write_run(tmp_path / "run", lines, model_family="flux", train_batch_size=2, gradient_accumulation_steps=3)
    record = json.loads((path / "run.json").read_text())
    record["starts"][-1]["processes"] = 4
    (path / "run.json").write_text(json.dumps(record))
    assert read_run(path).batch == 24


def test_a_line_of_equal_values_keeps_its_corners(tmp_path: Path) -> None:
    kept = [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    run = read_run(write_run(tmp_path / "run", [{"step": i, "tokens_kept": v} for i, v in enumerate(kept, start=1)]))
    assert figure([run], "tokens-kept").lines[0].points == [(1, 1.0), (3, 1.0), (4, 0.5), (6, 0.5)]


@pytest.mark.parametrize(("steps", "unit"), [(100, "seconds"), (120, "minutes"), (7200, "hours")])
def test_time_is_told_in_a_unit_of_which_there_are_two(tmp_path: Path, steps: int, unit: str) -> None:
    lines = [{"step": 1, "loss": 1.0}, {"step": steps, "images_per_second": 10.0}, {"step": steps, "val_loss": 1.0}]
    run = read_run(write_run(tmp_path / "run", lines))
    assert figure([run], "val-loss-by-time").x == unit


def test_a_rate_is_drawn_from_zero_however_small_it_ends(tmp_path: Path) -> None:
    lines = [{"step": step, "learning_rate": 10.0**-step} for step in range(1, 5)]
    found = figure([read_run(write_run(tmp_path / "run", lines))], "learning-rate")
    assert (found.zero, found.log) == (True, False)


def test_speedup_by_the_dense_steps_of_the_same_run(tmp_path: Path) -> None:
    """The stretch in which the ratio changes counts for neither; the first, which compiles, is left out."""
    kept = [1.0] * 6 + [0.5] * 6
    lines = speeds(kept, 2, {1.0: 10, 0.5: 15})
    lines[2]["images_per_second"] = 1.0  # the first stretch
    lines = [line for line in lines if line != {"step": 6, "images_per_second": 10}]  # so one is steps 5 to 8, mixed
    run = read_run(write_run(tmp_path / "run", lines, facts={"speedup": 1.75}))
    assert laps(run, 1.0) == [10]
    assert laps(run, 0.5) == [15, 15]
    (found,) = speedups([run])
    assert (found.predicted, found.measured) == (1.75, 1.5)
    assert found.means == "the medians of 2 routed and 1 dense stretches of this run"


@pytest.mark.parametrize(
    ("changed", "measured"),
    [
        ({}, 2.0),
        ({"optimizer": {"learning_rate": 1}}, 2.0),
        ({"train": {"steps": 7, "batch_size": 10}}, 2.0),
        ({"train": {"steps": 100, "batch_size": 5}}, None),
        ({"model": {"name": "dit", "depth": 3}}, None),
    ],
)
def test_speedup_over_a_dense_run_that_is_otherwise_alike(
    tmp_path: Path, changed: dict[str, Any], measured: float | None
) -> None:
    routed = write_run(tmp_path / "routed", speeds([0.5] * 8, 2, {0.5: 20}))
    dense = write_run(tmp_path / "dense", speeds([1.0] * 8, 2, {1.0: 10}), **{"model": {"name": "dit"}, **changed})
    runs = [read_run(routed), read_run(dense)]
    (found,) = speedups(runs)
    assert (found.run, found.measured) == (0, measured)
    assert ("of dense" in found.means) == (measured is not None)
    (alone,) = speedups(runs[:1])
    assert alone.measured is None
    assert "no dense run beside it" in alone.means


@pytest.mark.parametrize("other", [{"grid": [1, 4, 8]}, {"device": "another"}])
def test_a_run_of_other_samples_or_on_another_device_is_no_measure(tmp_path: Path, other: dict[str, Any]) -> None:
    lines, facts = (speeds([0.5] * 8, 2, {0.5: 20}), speeds([1.0] * 8, 2, {1.0: 10})), {"grid": [1, 4, 4]}
    routed, dense = (write_run(tmp_path / str(i), one, facts=facts) for i, one in enumerate(lines))
    assert speedups([read_run(routed), read_run(dense)])[0].measured == 2.0
    record = json.loads((dense / "run.json").read_text())
    record["facts"] |= {"grid": other.get("grid", [1, 4, 4])}
    record["starts"][-1]["device"] = other.get("device", "cpu")
    (dense / "run.json").write_text(json.dumps(record))
    assert speedups([read_run(routed), read_run(dense)])[0].measured is None


@pytest.mark.parametrize("size", ["tiny", "modern-tiny"])
def test_the_recorded_speedup_is_what_torch_counts(tmp_path: Path, size: str) -> None:
    """FLOPs of the layers in one forward, dense and routed, on the meta device: a CPU counter misses attention."""
    task, _ = make_session(tmp_path, f"model.size={size}", "model.width=64", "model.heads=4")
    assert task.handle is not None
    net = task.model.to("meta").train()
    inputs = [torch.zeros(2, 1, 8, 8), torch.zeros(2), torch.zeros(2, dtype=torch.int64)]
    flops = []
    for mode in (task.handle.dense(), task.handle.routed()):
        with mode, FlopCounterMode(display=False) as counter:
            net(*(tensor.to("meta") for tensor in inputs))
        counts = counter.get_flop_counts()
        flops.append(sum(sum(n.values()) for name, n in counts.items() if name.split(".")[-2:-1] == ["blocks"]))
    assert task.facts["speedup"] == pytest.approx(flops[0] / flops[1], rel=1e-9)


def test_bins_keep_the_mean_and_the_extremes() -> None:
    points = [(float(step), float(step * step % 17)) for step in range(1, 1001)]
    bins = binned(points, 120)
    assert len(bins) == 112  # of nine steps each
    assert sum(y * 9 for _, y, _, _ in bins[:-1]) == pytest.approx(sum(y for _, y in points[:-1]))
    for x, mean, low, high in bins[:-1]:
        inside = [y for step, y in points if abs(step - x) <= 4]
        assert (mean, low, high) == pytest.approx((sum(inside) / 9, min(inside), max(inside)))


def test_every_figure_of_an_evaluation_is_drawn_whatever_its_name(tmp_path: Path) -> None:
    lines = [{"step": step, "FID guidance 1.5": 30.0 / step, "recall": 0.1 * step, "KID std": 1.0} for step in (1, 2)]
    drawn = figures([read_run(write_run(tmp_path / "run", lines))])["Evaluation"]
    assert [(one.title, one.note) for one in drawn] == [
        ("FID guidance 1.5", "Lower is better."),
        ("recall", "Higher is better."),
    ]


def test_figures_have_keys_of_their_own(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 1.0, "LOSS": 1.0, "FID 1.5": 1.0, "FID 1,5": 2.0, "Memory": 1.0, "memory_gib": 1.0}]
    keys = [one.key for some in figures([read_run(write_run(tmp_path / "run", lines))]).values() for one in some]
    assert len(set(keys)) == len(keys) == 6


def test_shares_are_drawn_up_to_one(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", speeds([0.5] * 3, 9, {})))
    assert bounds(figure([run], "tokens-kept")) == pytest.approx((1, 3, 0, 1.05))
    assert speedups([run])[0].means == "no speed was logged yet"


def test_routed_stretches_are_found(tmp_path: Path) -> None:
    kept = [1.0, 0.5, 0.5, 1.0, 0.5]
    run = read_run(write_run(tmp_path / "run", speeds(kept, 9, {})))
    assert routed_spans(run) == [(2, 3), (5, 5)]
    assert routed_spans(read_run(write_run(tmp_path / "all", speeds([0.5] * 3, 9, {})))) == []


def test_a_line_is_drawn_where_its_numbers_are() -> None:
    """The corners of the plot, on a linear and on a logarithmic axis."""
    line = Line(name="a", run=0, points=[(0, 1.0), (50, 10.0), (100, 100.0)])
    for log in (False, True):
        drawn = draw(Curves(key="k", title="t", x="steps", lines=[line], log=log))
        path = re.search(r'<path d="M([^"]*)" class="curve"', drawn)
        assert path
        (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, point.split())) for point in path[1].split("L")]
        assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
        share = 0.5 if log else 9 / 99
        assert y1 == pytest.approx(y0 + share * (y2 - y0), abs=0.2)


def test_lines_that_a_logarithm_cannot_draw() -> None:
    """Zeros and negative numbers are left out, a constant line and a single point have an axis."""
    lines = [Line(name="a", run=0, points=[(1, 0.0), (2, 5.0)]), Line(name="b", run=7, points=[(1, 1.0)])]
    assert "dashed" in draw(Curves(key="k", title="t", x="steps", lines=lines, log=True))
    for y in (0.0, 3.0, -2.0):
        flat = [Line(name="a", run=0, points=[(4, y)])]
        for zero in (False, True):
            assert "nan" not in draw(Curves(key="k", title="t", x="steps", lines=flat, zero=zero))
    bars = [Bar(name="a", run=0, value=0.0, label="0"), Bar(name="b", run=1, value=-1.0, label="-1")]
    assert 'width="1.0"' in draw(Bars(key="k", title="t", bars=bars))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (0.62, 0.63), (1e-6, 4e-6), (1, 1e7), (199.5, 200.5)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = ticks(low, high, 5)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    assert len({number(tick) for tick in found}) == len(found)


@pytest.mark.parametrize(("low", "high"), [(0.05, 2), (1e-8, 1e8), (0.9, 11), (3, 41)])
def test_log_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = log_ticks(low, high)
    assert 2 <= len(found) <= 9
    assert all(low * 0.98 <= tick <= high * 1.02 for tick in found)


def test_a_single_point_among_lines_is_named_beside_it() -> None:
    """At the end of a line's axis its name would be that of another value."""
    line = Line(name="front", run=0, points=[(1.0, 1.0), (2.0, 5.0), (3.0, 9.0)])
    for x, anchor in ((1.5, "start"), (2.3, "start"), (3.0, "end")):
        point = Line(name="chosen", run=1, points=[(x, 3.0)])
        drawn = draw(Curves(key="k", title="t", x="x", lines=[line, point]))
        (at,) = re.findall(r'<circle cx="([\d.]+)"', drawn)
        (label,) = re.findall(r"<text ([^>]*)>chosen</text>", drawn)
        assert f'text-anchor="{anchor}"' in label
        (beside,) = re.findall(r'(?<![a-z])x="([\d.]+)"', label)
        assert abs(float(beside) - float(at)) < 10
