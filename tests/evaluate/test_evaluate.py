"""The whole way: folders in, figures out; resumed, over two processes, from files of statistics."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.evaluate.ranks import main as measure_in_rank
from tests.forks import in_ranks
from tests.pretrain.corner import register
from tests.programs import ROOT, finished
from tread.cli import main
from tread.errors import ConfigError, DataError, RiskWarning
from tread.evaluate.compare import compare, evaluate, measure, save_reference, statistics_at
from tread.evaluate.features import Extractor
from tread.evaluate.frechet import frechet_distance
from tread.evaluate.images import ArrayImages, open_images
from tread.page.read import FIGURES

RNG = np.random.default_rng(0)
BRIGHT = RNG.integers(100, 256, size=(40, 8, 8, 3), dtype=np.uint8)
DARK = RNG.integers(0, 150, size=(30, 8, 8, 3), dtype=np.uint8)


def corner(name: str = "Corner") -> Extractor:
    """Four pixels of an image, scaled."""
    return Extractor(name, nn.Flatten(), lambda x: x[:, :, :2, :2].float().mean(1) / 255)


def write(images: np.ndarray, folder: Path) -> Path:
    folder.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i:03d}.png")
    return folder


def test_figures_are_those_of_an_independent_computation(tmp_path: Path) -> None:
    places = write(BRIGHT, tmp_path / "a"), write(DARK, tmp_path / "b")
    with pytest.warns(RiskWarning, match="40 samples against 30: unequal counts"):
        report = evaluate(*places, corner(), batch_size=7, progress=False)
    assert report is not None
    rows = [side[:, :2, :2].astype(np.float32).mean(-1).reshape(-1, 4) / 255 for side in (BRIGHT, DARK)]
    moments = [x for side in rows for x in (side.mean(0, dtype=np.float64), np.cov(side, rowvar=False))]
    assert report.metrics["FD-Corner"] == pytest.approx(frechet_distance(*moments), rel=1e-5)
    assert (report.samples, report.reference) == (40, 30)
    assert {"precision-Corner", "recall-Corner", "KD-Corner"} <= report.metrics.keys()
    assert not {"FID", "sFID", "KID", "IS"} & report.metrics.keys()
    assert "FD-Corner" in report.table()


class Stop(Exception):
    pass


class Counting(ArrayImages):
    """Images that fail after a while, and count what was read."""

    def __init__(self, images: np.ndarray, good: int) -> None:
        super().__init__(images)
        self.good, self.seen = good, 0

    def read(self, first: int, stop: int) -> list[np.ndarray]:
        if first >= self.good:
            raise Stop
        self.seen += stop - first
        return super().read(first, stop)


def test_an_interrupted_pass_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tread.evaluate.compare.SAVE_SECONDS", -1)
    with pytest.raises(Stop):
        measure(Counting(BRIGHT, 24), corner(), batch_size=8, work=tmp_path, progress=False)
    rest = Counting(BRIGHT, 40)
    found = measure(rest, corner(), batch_size=5, work=tmp_path, progress=False)
    assert rest.seen == 16
    whole = measure(ArrayImages(BRIGHT), corner(), progress=False)
    np.testing.assert_allclose(found.pool.covariance, whole.pool.covariance, rtol=1e-12)
    (whole_file,) = tmp_path.iterdir()
    part = whole_file.with_suffix(".part-0-of-1.npz")
    part.touch()  # a kill came after the whole was saved and before its part was removed
    again = Counting(BRIGHT, 0)
    measure(again, corner(), work=tmp_path, progress=False)
    assert again.seen == 0
    assert not part.exists()
    other = Extractor("Corner", nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), corner().prepare)
    with pytest.raises(Stop):  # other weights: nothing of the old pass is used
        measure(again, other, work=tmp_path, progress=False)


def test_a_saved_reference_stands_for_its_images(tmp_path: Path) -> None:
    theirs = measure(ArrayImages(DARK), corner(), progress=False)
    path = tmp_path / "ref.npz"
    save_reference(path, ArrayImages(DARK), theirs)
    ours = measure(ArrayImages(BRIGHT), corner(), progress=False)
    again = statistics_at(path, corner(), progress=False)
    assert compare(ours, again) == compare(ours, theirs)
    assert statistics_at(path, corner(), keep_vectors=False, progress=False).vectors is None


def test_a_pass_without_features_does_not_stand_for_one_with_them(tmp_path: Path) -> None:
    without = measure(ArrayImages(BRIGHT), corner(), work=tmp_path, keep_vectors=False, progress=False)
    assert without.vectors is None
    again = measure(ArrayImages(BRIGHT), corner(), work=tmp_path, progress=False)
    assert again.vectors is not None


def test_a_saved_reference_of_several_sizes_has_the_statistics_alone(tmp_path: Path) -> None:
    """Photos as they are: their pass is not lost, and the Frechet distance is that of the images."""
    photos, path = tmp_path / "photos", tmp_path / "ref.npz"
    photos.mkdir()
    for i, size in enumerate([(8, 8), (6, 9), (8, 8), (5, 5), (7, 4), (9, 9)]):
        Image.fromarray(BRIGHT[i]).resize(size).save(photos / f"{i}.png")
    with pytest.warns(RiskWarning, match=r"image 1 has 6 x 9 .*ref\.npz has the statistics alone"):
        assert evaluate(photos, None, corner(), save=path, progress=False) is None
    samples = measure(ArrayImages(DARK), corner(), progress=False)
    saved, measured = statistics_at(path, corner()), measure(open_images(photos), corner(), progress=False)
    assert saved.count == 6
    assert saved.vectors is None
    assert compare(samples, saved).metrics["FD-Corner"] == compare(samples, measured).metrics["FD-Corner"]


def test_published_statistics_count_and_spare_a_pass(tmp_path: Path) -> None:
    """ADM's files: statistics of a whole dataset, and some of its images for what needs them."""
    path = tmp_path / "ref.npz"
    published = {"mu": np.zeros(4), "sigma": np.eye(4), "features": np.array("Corner")}
    np.savez(path, arr_0=DARK, **published)
    measured = statistics_at(path, corner(), progress=False)
    assert (measured.pool.mean == 0).all()
    assert measured.vectors is not None
    assert measured.count is None, "how many images the statistics are of is unknown"
    unreadable = Extractor("Corner", nn.Flatten(), lambda images: images / 0)
    assert statistics_at(path, unreadable, keep_vectors=False, progress=False).vectors is None


def test_published_statistics_are_inceptions_unless_they_say_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "ref.npz"
    np.savez(path, mu=np.zeros(4), sigma=np.eye(4))
    with pytest.raises(ConfigError, match="holds statistics of Inception; with `features` of Corner give images"):
        statistics_at(path, corner())
    np.savez(path, mu=np.zeros(4), sigma=np.eye(4), features=np.array("Corner"))
    report = compare(measure(ArrayImages(BRIGHT), corner(), progress=False), statistics_at(path, corner()))
    assert list(report.metrics) == ["FD-Corner"]
    assert report.reference is None
    assert "precision, recall and the kernel distance were not taken" in report.notes[-1]


def test_two_processes_measure_as_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", BRIGHT)
    in_ranks(measure_in_rank, tmp_path)
    whole = measure(ArrayImages(BRIGHT), corner(), progress=False)
    assert whole.vectors is not None
    for rank in range(2):
        with np.load(tmp_path / f"rank-{rank}.npz") as found:
            np.testing.assert_allclose(found["covariance"], whole.pool.covariance, rtol=1e-12)
            assert (found["vectors"] == whole.vectors).all()


def eval_in(folder: Path, *options: str) -> None:
    """`tread eval` of a/ beside b/, in the processes of a run."""
    register()
    given = ["--ref", str(folder / "b"), "--features", "corner", "--device", "cpu", "--batch-size", "4", *options]
    main(["eval", str(folder / "a"), *given])


@pytest.mark.parametrize("count", [2, 40])
def test_the_command_on_several_processes_is_that_on_one(
    count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Shares and last batches are uneven; of two images, one of three processes has none."""
    write(BRIGHT[:count], tmp_path / "a")
    write(DARK, tmp_path / "b")
    records = {}
    for processes in (1, 3):
        work, save = tmp_path / f"work-{processes}", tmp_path / f"{processes}.npz"
        in_ranks(eval_in, tmp_path, "--work", str(work), "--save", str(save), processes=processes)
        out, err = capfd.readouterr()
        assert out.count("precision-Corner") == err.count("warning: the reference: 30 images are few.") == 1
        records[processes] = json.loads((work / FIGURES).read_text())
        assert records[processes]["start"]["processes"] == processes
        assert len(list(work.glob("*.npz"))) == 2, "no part is left"
    assert records[3]["metrics"] == pytest.approx(records[1]["metrics"], rel=1e-9, abs=1e-12)
    with np.load(tmp_path / "1.npz") as one, np.load(tmp_path / "3.npz") as three:
        assert (one["arr_0"] == three["arr_0"]).all()
        np.testing.assert_allclose(three["sigma"], one["sigma"], rtol=1e-9, atol=1e-15)


def test_only_the_first_images_count(tmp_path: Path) -> None:
    place, ref = write(BRIGHT, tmp_path / "a"), write(DARK, tmp_path / "b")
    first = write(BRIGHT[:12], tmp_path / "first")
    options = {"batch_size": 5, "progress": False}
    with pytest.warns(RiskWarning):
        found = evaluate(place, ref, corner(), count=12, work=tmp_path / "work", save=tmp_path / "12.npz", **options)
        assert found == evaluate(first, ref, corner(), **options)
        # the file's own statistics are of twelve images, so they do not stand for five
        five = evaluate(tmp_path / "12.npz", ref, corner(), count=5, **options)
        assert five == evaluate(write(BRIGHT[:5], tmp_path / "five"), ref, corner(), **options)
        assert evaluate(place, ref, corner(), work=tmp_path / "work", **options) != found
    assert found is not None
    assert found.samples == 12
    with pytest.raises(ConfigError, match=r"^--count is 41, but SAMPLES has 40 images; lower it or leave it out\.$"):
        evaluate(place, ref, corner(), count=41)
    with pytest.raises(ConfigError, match=r"^--count is 1; it must be at least 2\.$"):
        evaluate(place, ref, corner(), count=1)
    np.savez(tmp_path / "only.npz", mu=np.zeros(4), sigma=np.eye(4), features=np.array("Corner"))
    with pytest.raises(ConfigError, match=r"only\.npz holds statistics and no images to count; leave --count out\.$"):
        evaluate(tmp_path / "only.npz", ref, corner(), count=5)


def never() -> Extractor:
    """Measures nothing, whatever it is asked."""

    def measured(x: Tensor) -> Tensor:
        raise AssertionError("an image was measured")

    return Extractor("Never", nn.Flatten(), measured)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"arr_0": BRIGHT[:0]}, r"ref\.npz has 0 images? and so no covariance; give at least 2"),
        ({"arr_0": BRIGHT[:1]}, r"ref\.npz has 1 images? and so no covariance; give at least 2"),
        ({"images": BRIGHT}, "holds neither images nor mu and sigma; with `features` of Never give images"),
        ({"mu": np.zeros(4), "sigma": np.eye(4)}, "holds statistics of Inception; with `features` of Never give"),
        ({"mu": np.zeros(4)}, r"has mu \(4,\); statistics are mu \(D,\) and sigma \(D, D\): write it again"),
        ({"mu": np.zeros(4), "sigma": np.eye(3)}, r"has mu \(4,\) and sigma \(3, 3\); statistics are"),
        ({"mu": np.full(4, np.nan), "sigma": np.eye(4)}, "has numbers in mu or sigma that are not finite"),
        (None, "there is nothing at"),
    ],
)
def test_both_sides_are_looked_at_before_the_first_image_is_measured(
    tmp_path: Path, arrays: dict[str, np.ndarray] | None, message: str
) -> None:
    place, reference = write(BRIGHT[:6], tmp_path / "a"), tmp_path / "ref.npz"
    if arrays is not None:
        np.savez(reference, **arrays)  # pyright: ignore[reportArgumentType]
    with pytest.raises((ConfigError, DataError), match=message):
        evaluate(place, reference, never(), progress=False)


def test_where_to_save_is_looked_at_before_the_first_image_is_measured(tmp_path: Path) -> None:
    place, statistics = write(BRIGHT[:6], tmp_path / "a"), tmp_path / "statistics.npz"
    with pytest.raises(ConfigError, match=r"ref\.txt'; the name must end with \.npz\.$"):
        evaluate(place, None, never(), save=tmp_path / "ref.txt", progress=False)
    with pytest.raises(ConfigError, match=r"^--work is '.*000\.png', which is a file; name a folder\.$"):
        evaluate(place, None, never(), work=place / "000.png", save=tmp_path / "ref.npz", progress=False)
    np.savez(statistics, mu=np.zeros(4), sigma=np.eye(4), features=np.array("Never"))
    with pytest.raises(ConfigError, match=r"^--save writes images, and .* holds none; give it to --ref as it is\.$"):
        evaluate(statistics, None, never(), save=tmp_path / "ref.npz", progress=False)
    evaluate(place, None, corner(), save=tmp_path / "new" / "ref.npz", progress=False)
    assert (tmp_path / "new" / "ref.npz").exists()


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "a", "--ref", "b", "--device", "abacus"])
    assert capsys.readouterr().err == (
        "tread eval: --device is 'abacus', which is not there; use cpu, or leave it out.\n"
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--weights", "none.pth"], "put them there or name them with --weights (a file, or a URL to download)"),
        (["--features", "incepton"], "--features is 'incepton'. Did you mean 'inception'?"),
    ],
)
def test_errors_name_the_options(given: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "a", "--ref", "b", "--device", "cpu", *given])
    assert sentence in capsys.readouterr().err


def test_the_command_on_two_folders(tmp_path: Path, lite0: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bright, dark = write(BRIGHT[:6], tmp_path / "a"), write(DARK[:5], tmp_path / "b")
    weights = ["--features", "efflite0", "--weights", str(lite0)]
    main(["eval", str(bright), "--ref", str(dark), "--device", "cpu", "--batch-size", "4", *weights, "--json"])
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["samples"], found["reference"]) == (6, 5)
    assert found["metrics"]["FD-EffLite0"] > 0
    assert "warning: samples: 6 images are no more than the 1280 features" in shown.err
    main(["eval", str(dark), "--save", str(tmp_path / "ref.npz"), "--device", "cpu", *weights])
    assert capsys.readouterr().out == f"saved: {tmp_path / 'ref.npz'}\n"
    main(["eval", str(bright), "--ref", str(tmp_path / "ref.npz"), "--device", "cpu", "--frechet-only", *weights])
    assert f"FD-EffLite0  {found['metrics']['FD-EffLite0']:>12.5g}" in capsys.readouterr().out
    work = tmp_path / "work"
    small = ["--device", "cpu", "--count", "4", "--work", str(work), *weights]
    main(["eval", str(bright), "--ref", str(dark), *small, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 4
    kept = json.loads((work / "evaluation.json").read_text())
    assert {name: kept[name] for name in found} == found
    assert kept["paths"] == {"samples": str(bright), "ref": str(dark)}
    main(["report", str(work)])
    assert f"<td>{found['metrics']['FD-EffLite0']:.5g}</td>" in (work / "report.html").read_text()


def test_the_door_at_the_root_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ended = finished(ROOT / "fid.py", "a", "b.npz")
    assert ended.returncode == 2
    assert ended.stderr.startswith("tread eval: no weights at ")
    assert "--features" in ended.stderr


def test_the_modes_of_the_door_are_tread_eval(tmp_path: Path, lite0: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bright, dark = write(BRIGHT[:6], tmp_path / "a"), write(DARK[:5], tmp_path / "b")
    options = ["--features", "efflite0", "--weights", lite0, "--device", "cpu"]
    made = finished(ROOT / "fid.py", "--mode", "ref", f"--data={dark}", f"--dest={tmp_path / 'ref.npz'}", *options)
    assert made.stdout == f"saved: {tmp_path / 'ref.npz'}\n", made.stderr
    found = finished(
        ROOT / "fid.py",
        "--ref",
        tmp_path / "ref.npz",
        "--images",
        bright,
        "--mode=calc",
        "--num",
        4,
        "--json",
        *options,
    )
    main(["eval", str(bright), "--ref", str(dark), "--count", "4", "--json", *map(str, options)])
    assert json.loads(found.stdout)["metrics"] == pytest.approx(json.loads(capsys.readouterr().out)["metrics"])


def test_other_modes_of_the_door_are_refused() -> None:
    for given, mode in (
        (["--mode", "train"], "train"),
        (["--mode"], ""),
        (["--mode=calculate", "a", "b"], "calculate"),
    ):
        ended = finished(ROOT / "fid.py", *given)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr == f"fid.py: --mode is {mode!r}; choose one of: calc, ref.\n"


def test_the_figures_of_one_side_need_one_extractor() -> None:
    sides = [measure(ArrayImages(DARK), corner(name), progress=False) for name in ("One", "Two")]
    with pytest.raises(ConfigError, match="features of One and the reference of Two"):
        compare(*sides)
    torch.testing.assert_close(sides[0].pool.mean, sides[1].pool.mean)
