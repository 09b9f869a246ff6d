"""Figures are `tread eval`'s, of equal counts where they stand side by side, and results of several calls join."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.quality import pictures
from benchmarks.quality.__main__ import kept
from benchmarks.quality.arms import SCALES
from benchmarks.quality.images import load
from benchmarks.quality.judge import Judge, by_class, extract
from benchmarks.quality.pictures import save_curves, save_heat_map
from benchmarks.quality.report import (
    averaged,
    headline_table,
    marks_table,
    missing_text,
    pictures_of_samples,
    report,
    speed_table,
)
from benchmarks.quality.results import GRIDS, NEAREST, RESULTS, Results, run_name, snapshot
from benchmarks.quality.run import blank
from benchmarks.quality.studies import guidance_table, placements, studies_text
from tests.programs import ROOT
from tests.tiny.quality import SECONDS, SMOKE, job_of, spec_of
from tread.evaluate.compare import compare
from tread.evaluate.statistics import Tally


def replace_samples(results: Results, **samples: dict[str, float]) -> Results:
    """The routed run of some results with other figures at its end."""
    name = run_name("routed", 0, SECONDS)
    copied = Results(results.folder.with_name("nowhere"))
    copied.merge(json.loads(json.dumps(results.facts)))
    end = snapshot(copied.runs[name], "end")
    assert end is not None
    end["samples"] = {name: figures | {"gflops_per_sample": 1.0} for name, figures in samples.items()}
    return copied


def test_figures_are_those_of_tread_eval(prepared: Path, judge: Judge) -> None:
    train, test = (load(prepared / "data", split)[0] for split in ("train", "test"))
    theirs = []
    for images in (test, train):
        tally = Tally("Pixels", len(images))
        tally.add(judge.extractor(list(images)), 0)
        theirs.append(tally.statistics())
    shown = judge.vectors.numpy()
    found = judge.figures(extract(judge.extractor, test))
    expected = compare(theirs[0], theirs[1]).metrics
    assert found["FD-Pixels"] == pytest.approx(expected["FD-Pixels"], rel=1e-6)
    few = compare(theirs[0], replace(theirs[1], vectors=shown)).metrics
    assert (found["precision"], found["recall"]) == (few["precision-Pixels"], few["recall-Pixels"])
    assert found["KD-Pixels"] == few["KD-Pixels"]
    # and of other samples to the test images, of which `vectors` are some
    theirs[0] = replace(theirs[0], vectors=judge.test_vectors.numpy())
    expected = compare(theirs[1], theirs[0]).metrics
    found = judge.figures(extract(judge.extractor, train))
    assert found["FD-Pixels test"] == pytest.approx(expected["FD-Pixels"], rel=1e-6)
    assert found["KD-Pixels test"] == expected["KD-Pixels"]
    assert found["FD-Pixels test"] != found["FD-Pixels"]


def test_the_nearest_training_images(prepared: Path, judge: Judge) -> None:
    train = load(prepared / "data", "train")[0]
    noise = np.random.default_rng(0).integers(-9, 10, (20, *train.shape[1:]))
    drawn = (train[50:70].astype(int) + noise).clip(0, 255).astype(np.uint8)
    assert (judge.nearest_in_training(drawn) == train[50:70]).all()
    features = extract(judge.extractor, drawn)
    expected = ((features[:, None] - extract(judge.extractor, train)[None]) ** 2).sum(-1).argmin(1)
    assert expected.tolist() == list(range(50, 70))


def test_a_long_pair_and_an_annealed_one_are_missing_until_both_arms_have_run(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for arm, missing in (("dense", True), ("routed", False)):
        job = job_of(arm, seconds=1200)
        results.write(job.name, blank(job) | {"status": "done", "annealed": {}})
        lines = missing_text(results).splitlines()
        assert ("- A pair of 20 minutes." in lines) is ("- A pair annealed to zero." in lines) is missing
    short = results.only(lambda entry: entry["arm"]["name"] == "dense")
    short.runs["routed-s0-430s"] = blank(job_of("routed", seconds=430)) | {"status": "done"}
    assert "- A pair of 20 minutes." in missing_text(short)


def test_samples_learned_by_heart_are_closer_to_training(judge: Judge) -> None:
    seen, unseen = judge.vectors.numpy(), judge.test_vectors.numpy()
    assert len(seen) == len(unseen)
    for features, share in ((seen + 1e-4, 1.0), (unseen + 1e-4, 0.0)):
        assert judge.figures(features)["closer to training"] == share
    middle = np.concatenate([seen[:25], unseen[:25]]) + 1e-4
    assert judge.figures(middle)["closer to training"] == 0.5


def test_the_first_few_have_the_figures_of_no_more(prepared: Path, judge: Judge, found: Results) -> None:
    features = extract(judge.extractor, load(prepared / "data", "train")[0])
    features[: SMOKE.few : 2] += 3  # half of the first few are far from everything
    many, few = judge.figures(features), judge.figures(features[: SMOKE.few])
    for name in ("FD-Pixels", "precision", "recall"):
        assert many[f"{name} few"] == few[name] == few[f"{name} few"]
        assert many[name] != few[name]
    routed = replace_samples(found, unguided=many, cfg=few)
    lines = [line.split(" | ") for line in guidance_table(routed, "FD-Pixels").splitlines() if "| routed" in line]
    assert [line[1] for line in lines] == ["unguided", "cfg"]
    assert lines[0][4:7] == lines[1][4:7]


def test_the_table_of_rates(found: Results) -> None:
    """Rates of an arm below each other; what older results did not measure, or on fewer samples, is left out."""
    joined = replace_samples(found)
    for rate, old in ((0.0012, False), (0.0003, True)):
        name = f"routed-{rate:g}"
        entry = json.loads(json.dumps(found.runs[run_name("routed", 0, SECONDS)]))
        entry["arm"]["name"], entry["settings"]["optimizer"]["learning_rate"] = name, rate
        end = snapshot(entry, "end")
        assert end is not None
        figures = {"FD-Pixels": 1.5, "FD-Pixels few": 2.5, "FD-Pixels test": 3.5, "KD-Pixels": 0.4, "KD-Pixels test": 1}
        end["samples"] = {"unguided": figures | {"count": SMOKE.samples}, "cfg": figures | {"count": SMOKE.samples}}
        if old:
            del end["samples"]["unguided"]["FD-Pixels test"]
            end["samples"]["cfg"]["count"] = SMOKE.few
        joined.runs[run_name(name, 0, SECONDS)] = entry
    del joined.runs[run_name("routed", 0, SECONDS)]
    text = studies_text(joined, "FD-Pixels")
    assert text.startswith("### Learning rate")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "| routed" in line]
    assert [row[:3] + row[5:-1] for row in rows] == [
        ["routed", "0.0003", "0", "2.50", "1.50", "", "400.00", "1000.00", "", ""],
        ["routed", "0.0012", "0", "2.50", "1.50", "3.50", "400.00", "1000.00", "1.50", "3.50"],
    ]


def test_a_mean_is_of_what_all_have() -> None:
    shot = {"steps": 1, "seconds": 1.0, "val_loss": 1.0}
    new, old = ({"unguided": {"FD": 1.0, "FD test": 2.0}}, {"unguided": {"FD": 3.0}})
    assert averaged([shot | {"samples": new}, shot | {"samples": old}])["samples"] == {"unguided": {"FD": 2.0}}


def test_a_grid_has_a_row_for_each_class() -> None:
    labels = np.arange(200) % 10
    assert by_class(labels.reshape(200, 1))[:, 0].tolist() == np.arange(10).repeat(10).tolist()


def test_results_of_unequal_scale_do_not_join(prepared: Path, tmp_path: Path) -> None:
    for name in ("full", "rehearsal", "smoke"):
        results = Results(tmp_path / name)
        results.facts["machine"] = {"scale": asdict(SCALES[name])}
        results.write("x", {"status": "done"})
    paths = [tmp_path / name / RESULTS for name in ("full", "rehearsal", "smoke")]
    with pytest.raises(ValueError, match="do not join, leave one of them out: validated 5000 and 500; samples 10000"):
        Results(tmp_path / "joined", paths[:2])
    spec = replace(spec_of(prepared, tmp_path / "joined"), resume=(str(paths[2]),))
    assert "x" in spec.results().runs
    with pytest.raises(ValueError, match="do not join"):
        replace(spec, scale="full").results()


def pages(folder: Path) -> Path:
    """A copy of the pages that a report writes."""
    for name in ("results.md", "log.md"):
        shutil.copy(ROOT / "docs" / name, folder / name)
    return folder


def test_the_report(found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.quality.report.LONG", SECONDS)
    docs = pages(tmp_path)
    dense = json.loads(json.dumps(found.runs[run_name("dense", 0, 0.3)])) | {"seconds": SECONDS}
    results = Results(tmp_path / "more")
    results.facts |= {name: found.facts[name] for name in ("machine", "data")}
    results.write(run_name("dense", 0, SECONDS), dense)
    report([found.folder / RESULTS, tmp_path / "more" / RESULTS], docs, [found.folder / GRIDS])
    long, short = ((docs / name).read_text(encoding="utf-8") for name in ("results.md", "log.md"))
    end = snapshot(found.runs[run_name("routed", 0, SECONDS)], "end")
    assert end is not None
    line = next(line for line in long.splitlines() if line.startswith("| routed, equal wall-clock | 0 |"))
    assert f"| {end['samples']['unguided']['FD-Pixels']:.2f} |" in line
    assert "| routed, equal" not in short, "a run of that length is long"
    assert f"| dense | 0 | {found.runs[run_name('dense', 0, 0.3)]['steps']} | 0.3 |" in short
    assert "- Ratio: 0.25 over 2..8; 0.6 over 2..8; 0.75 over 2..8.\n" in long
    assert "- Headline:" not in long
    for name in ("quality", "speedup"):
        assert (docs / "results" / f"{name}.png").is_file()


def test_pictures_of_samples_are_of_the_longest_pair(tmp_path: Path) -> None:
    """Without grids the pictures that were drawn stay."""
    names = ["dense-s2-430s-end", "routed-s2-430s-equal-steps", "routed-s2-430s-end"]
    longer = [name.replace("s2-430s", "s1-1200s") for name in names]
    grids = {name: np.full((100, 32, 32, 3), 255, np.uint8) for name in longer}
    grids |= {name: np.zeros((100, 32, 32, 3), np.uint8) for name in names}
    assert pictures_of_samples(grids, tmp_path).count("samples.png") == 1
    with Image.open(tmp_path / "samples.png") as picture:
        assert np.asarray(picture.convert("L")).mean() > 200, "those of the shorter pair are black"
    assert not (tmp_path / "nearest.png").exists()
    grids |= {f"{name}{NEAREST}": np.zeros((100, 32, 32, 3), np.uint8) for name in longer}
    pictures_of_samples(grids, tmp_path)
    with Image.open(tmp_path / "nearest.png") as picture:
        assert 80 < np.asarray(picture.convert("L")).mean() < 190, "every other image is the black neighbour"
    assert pictures_of_samples({}, tmp_path).count("nearest.png") == 1


def test_the_tables_of_several_lengths_and_seeds(tmp_path: Path) -> None:
    """The longest first; a mean is of the seeds of one length."""
    results = Results(tmp_path)
    for seed, seconds, value in ((0, 20.0, 4.0), (1, 20.0, 6.0), (0, 30.0, 1.0)):
        figures = {"FD-EffLite0": value, "FD-EffLite0 few": value + 1, "precision": 0.5, "recall": 0.5}
        looks = [
            {"at": "mark", "due": 10.0, "seconds": 10.0, "steps": 5, "val_loss": 2.0, "samples": {"unguided": figures}},
            {"at": "end", "due": seconds, "seconds": seconds, "steps": 9, "val_loss": 1.0,
             "samples": {"unguided": figures}},
        ]  # fmt: skip
        entry = {"status": "done", "arm": {"name": "dense"}, "seed": seed, "seconds": seconds, "snapshots": looks}
        results.write(run_name("dense", seed, seconds), entry)
    rows = [line.split(" | ")[1:5] for line in headline_table(results, "FD-EffLite0").splitlines()[2:]]
    assert rows == [
        ["0", "9", "30.0", "1.00"],
        ["0", "9", "20.0", "4.00"],
        ["1", "9", "20.0", "6.00"],
        ["mean", "9", "20.0", "5.00"],
    ]
    routed = results.runs[run_name("dense", 0, 20.0)] | {"arm": {"name": "0.5@3..9"}}
    results.write(run_name("0.5@3..9", 0, 20.0), routed)
    assert "| 0.5 over 3..9 | 0 | 9 | 20.0 | 4.00 |" in headline_table(results, "FD-EffLite0"), "of all samples, too"
    del results.runs[run_name("0.5@3..9", 0, 20.0)]
    assert marks_table(results, "FD-EffLite0").splitlines()[0] == "| arm | seed | run of | 10 s | 20 s | 30 s |"
    assert marks_table(results, "FD-EffLite0").splitlines()[-1] == "| dense | 0 | 30 s | 2.00 |  | 2.00 |"


def test_results_of_several_calls_join(tmp_path: Path) -> None:
    first, second = Results(tmp_path / "a"), Results(tmp_path / "b")
    first.write("x", {"status": "done", "value": 1})
    second.write("x", {"status": "failed", "value": 2})
    second.write("y", {"status": "begun"})
    joined = Results(tmp_path / "c", [tmp_path / "a" / RESULTS, tmp_path / "b" / RESULTS])
    assert joined.runs == {"x": {"status": "done", "value": 1}, "y": {"status": "begun"}}


def test_the_pages_are_the_report_of_the_kept_results(tmp_path: Path) -> None:
    """`python -m benchmarks.quality report` writes them."""
    docs = pages(tmp_path)
    (docs / "results").mkdir()
    for picture in (ROOT / "docs" / "results").iterdir():  # those of samples stay: the grids are not kept
        (docs / "results" / picture.name).touch()
    report(kept(), docs)
    for name in ("results.md", "log.md"):
        assert (docs / name).read_text() == (ROOT / "docs" / name).read_text(), "out of date: write the report again"
    drawn = {path.name for path in (docs / "results").iterdir() if path.stat().st_size}
    assert drawn == {"quality.png", "speedup.png", "studies.png", "placement.png"}


def test_a_speed_is_compared_with_dense_on_the_same_gpu(tmp_path: Path) -> None:
    results = Results(tmp_path, kept())
    alone = speed_table(results)
    longer = results.runs["dense-s1-430s"] | {"seconds": 1200.0, "steps_per_second": 1.0, "gpu": "another"}
    results.runs["dense-s1-1200s"] = longer
    (ours, *rest), (before, *same) = (
        [line for line in table.splitlines() if " over " in line or "| dense |" in line]
        for table in (speed_table(results), alone)
    )
    assert "| 1.0 |" in ours
    assert ours != before
    assert rest == same


def test_runs_of_two_lengths_have_lines_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path, [path for path in kept() if path.name == "quality-430s-seed1.json"])
    drawn: dict[str, float] = {}
    monkeypatch.setattr(
        pictures, "_finish", lambda _, axes, __: drawn.update({x.get_label(): x.get_linewidth() for x in axes[0].lines})
    )
    save_curves(results, "FD-EffLite0", tmp_path / "a.png")
    assert drawn == {"dense, seed 1": 1.2, "routed, seed 1": 1.2}
    for name in list(results.runs):
        results.runs[name.replace("430", "1200")] = results.runs[name] | {"seconds": 1200.0}
    drawn.clear()
    save_curves(results, "FD-EffLite0", tmp_path / "b.png")
    assert drawn == {f"{arm}, seed 1, {s} s": w for arm in ("dense", "routed") for s, w in ((430, 1.2), (1200, 2.2))}


def test_the_map_of_windows(tmp_path: Path) -> None:
    results = Results(tmp_path, [ROOT / "benchmarks" / "results" / "quality.json"])
    windows = placements(results, "FD-EffLite0")
    ends = [
        results.runs[f"layers-1-7-s{seed}-30s"]["snapshots"][-1]["samples"]["unguided"]["FD-EffLite0 few"]
        for seed in (0, 1)
    ]
    assert windows[1, 7] == sum(ends) / 2, "the mean of the seeds"
    assert save_heat_map(results, windows, "FD-EffLite0", tmp_path / "map.png")
    assert (tmp_path / "map.png").is_file()
    few = dict(list(windows.items())[:4])
    assert not save_heat_map(results, few, "FD-EffLite0", tmp_path / "few.png"), "three windows and dense fill no map"
