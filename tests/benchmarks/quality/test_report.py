"""Figures are `tread eval`'s, of equal counts where they stand side by side, and results of several calls join."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality.arms import SCALES
from benchmarks.quality.images import load
from benchmarks.quality.judge import Judge, by_class, extract
from benchmarks.quality.pictures import save_heat_map
from benchmarks.quality.report import averaged, guidance_table, placements, report, studies_text
from benchmarks.quality.results import RESULTS, Results, run_name, snapshot
from tests.programs import ROOT
from tests.tiny.quality import SECONDS, SMOKE, spec_of
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


def test_the_report(found: Results, tmp_path: Path) -> None:
    docs = tmp_path / "results.md"
    shutil.copy(ROOT / "docs" / "results.md", docs)
    report([found.folder / RESULTS], docs, tmp_path / "joined.json")
    page = docs.read_text(encoding="utf-8")
    routed = found.runs[run_name("routed", 0, SECONDS)]
    end = snapshot(routed, "end")
    assert end is not None
    line = next(line for line in page.splitlines() if line.startswith("| routed, equal wall-clock | 0 |"))
    assert f"| {end['samples']['unguided']['FD-Pixels']:.2f} |" in line
    assert "- 0.75 over 2..8, seed 0 (ratio-0.75)" in page
    assert "- 0.5 over 2..8, seed 1 (routed)" in page
    assert "seed 0 (routed)" not in page
    assert (tmp_path / "results" / "quality.png").is_file()
    assert json.loads((tmp_path / "joined.json").read_text())["runs"] == found.runs


def test_results_of_several_calls_join(tmp_path: Path) -> None:
    first, second = Results(tmp_path / "a"), Results(tmp_path / "b")
    first.write("x", {"status": "done", "value": 1})
    second.write("x", {"status": "failed", "value": 2})
    second.write("y", {"status": "begun"})
    joined = Results(tmp_path / "c", [tmp_path / "a" / RESULTS, tmp_path / "b" / RESULTS])
    assert joined.runs == {"x": {"status": "done", "value": 1}, "y": {"status": "begun"}}


def test_the_page_is_the_report_of_the_kept_results(tmp_path: Path) -> None:
    kept = ROOT / "benchmarks" / "results" / "quality.json"
    docs = tmp_path / "results.md"
    shutil.copy(ROOT / "docs" / "results.md", docs)
    report([kept], docs, tmp_path / "joined.json")
    pages = [path.read_text(encoding="utf-8") for path in (docs, ROOT / "docs" / "results.md")]
    # the sample grids are not kept
    found, expected = ([line for line in page.splitlines() if line and "samples.png" not in line] for page in pages)
    assert found == expected
    assert (tmp_path / "results" / "studies.png").is_file()


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
