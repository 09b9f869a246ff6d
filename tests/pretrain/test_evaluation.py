"""Evaluation inside a run: its figures are `tread eval`'s, on any number of processes, and it changes nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch._dynamo.utils import counters

from tests.forks import in_ranks
from tests.pretrain.corner import corner
from tests.pretrain.evaluation_ranks import evaluate as evaluate_here
from tests.pretrain.test_run import make_vae, pixels
from tests.tiny.runs import (
    TINY,
    assert_same_run,
    assert_same_state,
    draw,
    final_state,
    forget,
    go_on,
    losses,
    make_session,
    metrics,
    train,
    write_latents,
)
from tread.data import Digits
from tread.errors import ConfigError, RiskWarning
from tread.evaluate.compare import evaluate
from tread.evaluate.features import FEATURES
from tread.pretrain.decode import make_decode
from tread.pretrain.evaluation import DataImages, ModelImages
from tread.pretrain.sample import open_run, sample_run
from tread.sampling.grid import make_grid
from tread.sampling.guidance import Branches
from tread.sampling.solvers import Churn

pytestmark = pytest.mark.filterwarnings("ignore::tread.routing.risks.RiskWarning")

# ten samples in batches of four: the last batch is short, and two processes share them otherwise than one
EVALUATE = [
    *["evaluate.every=2", "evaluate.samples=10", "evaluate.batch_size=4", "evaluate.features=corner"],
    *["evaluate.frechet_only=false", "sample.steps=3"],
]
LARGE = ["optimizer.learning_rate=0.02", "optimizer.warmup_steps=0"]


@pytest.fixture(autouse=True)
def features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEATURES, "corner", corner)


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return write(Digits.to_images(Digits()._images[:40]).numpy(), tmp_path / "reference")


def write(images: np.ndarray, folder: Path) -> Path:
    folder.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image.squeeze()).save(folder / f"{i:03d}.png")
    return folder


def reports(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((folder / "evaluation").glob("*.json"))}


def test_the_figures_are_those_of_tread_eval_on_the_same_images(tmp_path: Path, reference: Path) -> None:
    settings = [*LARGE, *EVALUATE, f"evaluate.reference={reference}", "evaluate.guidance=2", "sample.seed=3"]
    with pytest.warns(RiskWarning, match="10 images are few"):
        folder = train(tmp_path / "run", *settings, "train.steps=5")
    found = reports(folder)
    assert [*found] == ["step-00000002", "step-00000004", "step-00000005"]
    drawn = draw(open_run(folder), torch.arange(12) % 10, seed=3, guidance=2.0, batch_size=4)
    images = write(Digits.to_images(drawn)[:10].numpy(), tmp_path / "images")
    report = evaluate(images, reference, corner(), progress=False)
    assert report is not None
    assert found["step-00000005"]["metrics"] == pytest.approx(report.metrics, rel=1e-9)
    assert {"FD-Corner", "precision-Corner", "recall-Corner", "KD-Corner"} <= report.metrics.keys()
    assert (found["step-00000005"]["samples"], found["step-00000005"]["reference"]) == (10, 40)
    assert found["step-00000005"]["sampling"]["guidance"] == 2
    lines = [line for line in metrics(folder) if "FD-Corner" in line]
    assert lines == [{"step": report["step"], **report["metrics"]} for report in found.values()]
    assert len({line["FD-Corner"] for line in lines}) == 3


def test_several_guidance_scales_are_as_many_evaluations(tmp_path: Path, reference: Path) -> None:
    """Each has the figures of a run that has this scale alone, under its own name and in a file of its own."""
    settings = [*LARGE, *EVALUATE, f"evaluate.reference={reference}", "train.steps=3"]
    folder = train(tmp_path / "both", *settings, "evaluate.guidance=[1, 2.5]")
    found = reports(folder)
    steps = ("step-00000002", "step-00000003")
    assert [*found] == [f"{step}-guidance-{scale}" for step in steps for scale in ("1", "2.5")]
    figures = {line["step"]: line for line in metrics(folder) if "FD-Corner guidance 1" in line}
    for scale in ("1", "2.5"):
        alone = train(tmp_path / scale, *settings, f"evaluate.guidance={scale}")
        assert_same_state(final_state(alone), final_state(folder))
        for step, report in reports(alone).items():
            assert found[f"{step}-guidance-{scale}"] == report
            assert report["sampling"]["guidance"] == float(scale)
            line = figures[report["step"]]
            assert {name: line[f"{name} guidance {scale}"] for name in report["metrics"]} == report["metrics"]
    assert all(len(line) == 1 + 2 * len(found["step-00000003-guidance-1"]["metrics"]) for line in figures.values())
    assert figures[3]["FD-Corner guidance 1"] != figures[3]["FD-Corner guidance 2.5"]


def test_evaluation_and_previews_take_the_churn_of_the_settings(tmp_path: Path) -> None:
    churn = ["objective=edm", "sample.churn=8", "sample.churn_interval=[0.05, 50]", "sample.churn_noise=1.01"]
    drawing = ["sample.every=2", "sample.classes=2", "sample.per_class=2", *EVALUATE, "train.steps=2", *LARGE]
    folder = train(tmp_path / "run", *drawing, *churn)
    assert reports(folder)["step-00000002"]["sampling"]["churn"] == 8
    task, session = make_session(folder, *drawing, *churn)
    session.load(folder / "checkpoints")
    fresh, labels = Churn(s_churn=8, s_tmin=0.05, s_tmax=50, s_noise=1.01), torch.tensor([0, 0, 1, 1])
    with session.averaged():
        image = task.evaluation_images(task.config.evaluate).read(0, 1)[0]
        expected = Digits.to_images(draw(task, labels, guidance=1.5, churn=fresh))
        plain = Digits.to_images(draw(task, labels, guidance=1.5))
        first = Digits.to_images(draw(task, labels[:1], guidance=1.0, churn=fresh))[0]
    assert (image[:, :, :1] == first.numpy()).all()
    grid = np.asarray(Image.open(folder / "samples" / "step-00000002.png"))
    assert (grid == np.asarray(make_grid(expected, columns=2))).all()
    assert (expected != plain).any()
    for churn, images in ((None, expected), (0.0, plain)):
        out = tmp_path / f"churn-{churn}"
        sample_run(folder, classes="0-1", per_class=2, steps=3, churn=churn, out=out)
        assert (pixels(out)["grid.png"] == np.asarray(make_grid(images, columns=2))).all()


def test_evaluation_leaves_training_alone_and_resumes_exactly(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "train.steps=5", *LARGE)
    straight = train(tmp_path / "straight", "train.steps=5", *LARGE, *EVALUATE)
    assert losses(straight) == losses(plain)
    assert_same_state(final_state(straight), final_state(plain))
    resumed = train(tmp_path / "resumed", "train.steps=4", *LARGE, *EVALUATE)
    go_on(resumed, "train.steps=5")
    assert_same_run(straight, resumed)
    assert reports(straight) == reports(resumed)


def test_without_a_reference_it_is_the_training_data_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(tmp_path / "run", *EVALUATE, "train.steps=2")
    digits = Digits()
    everything = Digits.to_images(torch.stack([digits[i][0] for i in range(len(digits))]))
    task, _ = make_session(folder, *EVALUATE)
    assert task._evaluation is not None
    features = corner()([image.repeat(3, -1) for image in everything.numpy()]).pool.double().numpy()
    np.testing.assert_allclose(task._evaluation.reference.pool.mean, features.mean(0), rtol=1e-9)
    np.testing.assert_allclose(task._evaluation.reference.pool.covariance, np.cov(features.T), rtol=1e-9)
    assert reports(folder)["step-00000002"]["reference"] == 1797

    def no_reading(*_: object) -> None:
        raise AssertionError("the reference was read again")

    monkeypatch.setattr(DataImages, "read", no_reading)
    make_session(folder, *EVALUATE)
    with pytest.raises(AssertionError, match="read again"):
        make_session(tmp_path / "other", *EVALUATE)


def test_two_processes_evaluate_as_one(tmp_path: Path, reference: Path) -> None:
    settings = [*EVALUATE, f"evaluate.reference={reference}", "evaluate.guidance=2"]
    two = tmp_path / "two"
    two.mkdir()
    in_ranks(evaluate_here, [*TINY, *settings, f"output_dir={two}"])
    one = tmp_path / "one"
    one.mkdir()
    forget()
    evaluate_here([*TINY, *settings, f"output_dir={one}"])
    found = [reports(folder)["step-00000007"] for folder in (one, two)]
    assert found[0].pop("metrics") == pytest.approx(found[1].pop("metrics"), rel=1e-9)
    assert found[0] == found[1]
    # rank 1 begins with image 5, which one process draws second in its second batch
    second = task_images(one, *settings).read(4, 8)
    assert (np.load(two / "rank-1.npy")[:3] == second[1:]).all()
    assert (np.load(two / "rank-0.npy") == np.load(one / "rank-0.npy")).all()
    kept = [[path.name for path in (folder / "evaluation" / "reference").iterdir()] for folder in (one, two)]
    assert len(kept[0]) == 1
    assert kept[0] == kept[1]  # so a resume on another number of processes measures nothing again


def task_images(folder: Path, *settings: str) -> ModelImages:
    """As `evaluation_ranks.py` draws them."""
    task, _ = make_session(folder, *settings)
    torch.manual_seed(0)
    for parameter in task.model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    task.model.eval()
    assert task.config.evaluate is not None
    return task.evaluation_images(task.config.evaluate)


def test_labels_are_balanced_and_spread_where_there_are_few(tmp_path: Path) -> None:
    images = task_images(tmp_path, *EVALUATE)
    assert images.labels(8, 12).tolist() == [8, 9, 0, 1]
    images.num_classes = 1000
    assert images.labels(0, 10).tolist() == list(range(0, 1000, 100))
    images.num_classes = 14  # 1.4 of them for each sample
    assert images.labels(0, 12).tolist() == [0, 1, 2, 4, 5, 7, 8, 9, 11, 12, 0, 1]


def test_latents_are_decoded(tmp_path: Path) -> None:
    shards = write_latents(tmp_path / "shards" / "0.tar").parent
    vae = make_vae(tmp_path / "vae", 4)
    settings = ["data=latents", f"data.path={shards}", "data.num_classes=3", "train.steps=2", *EVALUATE]
    with pytest.raises(ConfigError) as error:
        train(tmp_path / "refused", *settings)
    assert str(error.value) == (
        "evaluate.every is 2, but latents are no images: name the autoencoder that decodes them with sample.vae, or "
        "set evaluate.every=0."
    )
    folder = train(tmp_path / "run", *settings, f"sample.vae={vae}", "sample.every=2", "sample.per_class=2")
    assert reports(folder)["step-00000002"]["reference"] == 24
    drawn = {"classes": "0-2", "per_class": 2, "steps": 3}
    sample_run(folder, **drawn, out=tmp_path / "out")  # the VAE is the run's own
    assert pixels(tmp_path / "out")["0000-00000.png"].shape == (8, 8, 3)
    grid = np.asarray(Image.open(folder / "samples" / "step-00000002.png")).astype(int)
    assert np.abs(grid - pixels(tmp_path / "out")["grid.png"]).max() <= 1


def test_a_decoder_of_another_scale_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vae = make_vae(tmp_path / "vae", 4)
    for name in ("sd", "none"):
        make_decode({"name": "latents", "vae": name}, 4, str(vae), setting="sample.vae")
    said = capsys.readouterr().out
    assert said.count("warning") == 1
    assert "sample.vae is the VAE sd, whose scale is not that of data.vae=none" in said


def test_previews_and_evaluation_take_the_guidance_of_the_settings(tmp_path: Path) -> None:
    sparse = ["sample.guidance_kind=sg", "sample.weak_ratio=0.5", "sample.guidance=3", "evaluate.guidance=3"]
    drawing = ["sample.every=2", "sample.classes=2", "sample.per_class=2", *EVALUATE, "train.steps=2", *LARGE]
    folder = train(tmp_path / "sg", *drawing, *sparse, "train.class_dropout=0")
    plain = train(tmp_path / "cfg", *drawing, "sample.guidance=1", "evaluate.guidance=1", "train.class_dropout=0")
    assert_same_state(final_state(folder), final_state(plain))
    assert reports(folder)["step-00000002"]["metrics"] != reports(plain)["step-00000002"]["metrics"]
    assert reports(folder)["step-00000002"]["sampling"]["guidance_kind"] == "sg"
    task, session = make_session(folder, *drawing, *sparse)
    session.load(folder / "checkpoints")
    with session.averaged():
        image = task.evaluation_images(task.config.evaluate).read(0, 1)[0]  # pyright: ignore[reportArgumentType]
        labels = torch.tensor([0, 0, 1, 1])  # the grid's; sample 0 is of class 0 in both
        expected = draw(task, labels, guidance=3.0, branches=Branches(kind="sg", weak_ratio=0.5))
    images = Digits.to_images(expected)
    assert (image[:, :, :1] == images[0].numpy()).all()
    grid = np.asarray(Image.open(folder / "samples" / "step-00000002.png"))
    assert (grid == np.asarray(make_grid(images, columns=2))).all()


def test_sample_takes_the_kind_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["sample.guidance_kind=sg", "sample.weak_ratio=0.5", "sample.strong_ratio=0.25", "train.steps=1"]
    folder = train(tmp_path / "run", *settings)
    capsys.readouterr()
    costs = {}
    for name, options in {
        "own": {},
        "spelled out": {"guidance_kind": "sg", "strong_ratio": 0.25, "weak_ratio": 0.5},
        "dense strong": {"strong_ratio": 0.0},
        "other kind": {"guidance_kind": "cfg"},
    }.items():
        sample_run(folder, per_class=1, classes="0", steps=2, out=tmp_path / name, **options)
        costs[name] = capsys.readouterr().out.split(" a sample")[0], (tmp_path / name / "0000-00000.png").read_bytes()
    assert costs["own"] == costs["spelled out"]
    assert len({cost for cost, _ in costs.values()}) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["evaluate.samples=1"], "evaluate.samples is 1; it must be at least 2."),
        (["evaluate.batch_size=0"], "evaluate.batch_size is 0; it must be at least 1."),
        (["evaluate.features=clip"], "evaluate.features is 'clip'. Choose one of: inception, efflite0, dinov2, cor"),
        (
            ["evaluate.guidance=2", "train.class_dropout=0", "sample.guidance=1"],
            "evaluate.guidance is 2.0, but train.class_dropout is 0, so the null class that guidance needs is never "
            "trained: set evaluate.guidance=1, or drop some labels.",
        ),
        (["sample.guidance_kind=ag"], "sample.guidance_kind is 'ag'; it must be one of 'cfg', 'sg', 'cfg+sg'."),
        (["sample.weak_ratio=0.5"], "weak ratio is 0.5, but the guidance kind 'cfg' has no sparse branch; leave it"),
        (
            ["sample.guidance_kind=sg", "model.tread_config=null"],
            "sample.guidance_kind is 'sg' with sample.strong_ratio 0.0, which drops tokens, but the model has no "
            "routes: set sample.guidance_kind=cfg and sample.strong_ratio=0, or give model.tread_config.",
        ),
        (["sample.vae=somewhere"], "sample.vae is given, but this run was trained on pixels; leave it out."),
    ],
)
def test_refusals(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        train(tmp_path / "run", *EVALUATE, *settings)
    assert str(error.value).startswith(message)


def test_missing_weights_and_references_are_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        train(tmp_path / "run", *EVALUATE, "evaluate.features=efflite0")
    for advice in (
        "name them with evaluate.weights (a file",
        "choose another of the extractors with evaluate.features",
    ):
        assert advice in str(error.value)
    with pytest.raises(ValueError, match="there is nothing at nowhere; name a folder of images"):
        train(tmp_path / "run", *EVALUATE, "evaluate.reference=nowhere")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_reference_of_another_width_is_said_before_training(tmp_path: Path) -> None:
    file = tmp_path / "reference.npz"
    np.savez(file, features="Corner", mu=np.zeros(3), sigma=np.eye(3))
    settings = [*EVALUATE, "evaluate.frechet_only=true", f"evaluate.reference={file}"]
    with pytest.raises(ConfigError) as error:
        train(tmp_path / "run", *settings)
    assert str(error.value) == (
        "evaluate.reference holds statistics of 3 features and evaluate.features corner has 8: name another one of the "
        "two."
    )
    assert not (tmp_path / "run" / "checkpoints").exists()
    np.savez(file, features="Corner", mu=np.zeros(8), sigma=np.eye(8))
    assert len(reports(train(tmp_path / "run", *settings, "train.steps=1"))) == 1


def test_a_run_from_before_there_was_evaluation_goes_on(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "train.steps=1")
    path = folder / "config.yaml"
    text = path.read_text()
    path.write_text(text[: text.index("evaluate:")])  # the last section
    assert len(losses(go_on(folder, "train.steps=2"))) == 2


@pytest.mark.parametrize(
    ("settings", "compiled"),
    [
        (["evaluate.guidance=2"], True),
        (["sample.guidance_kind=sg", "sample.weak_ratio=0.5"], True),
        (["sample.guidance_kind=sg", "sample.weak_ratio=0.5", "evaluate.guidance=2"], False),
        (["sample.strong_ratio=0.5"], False),
    ],
)
def test_only_guidance_that_drops_tokens_is_drawn_eagerly(tmp_path: Path, settings: list[str], compiled: bool) -> None:
    assert task_images(tmp_path, "train.compile=true", *EVALUATE, *settings).compiled == compiled
    assert not task_images(tmp_path, *EVALUATE, *settings).compiled


def test_compiled_layers_draw_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more graph than training has; what a graph is compiled to does not matter here."""
    compiled_by = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **options: compiled_by(*given, **options, backend="eager"))
    torch.compiler.reset()
    settings = ["train.compile=true", "train.steps=2", *LARGE]
    plain = train(tmp_path / "plain", *settings)
    torch.compiler.reset()
    before = counters["stats"]["unique_graphs"]
    compiled = train(tmp_path / "compiled", *settings, *EVALUATE)
    # inside the window, outside, and the one shape of all samples
    assert counters["stats"]["unique_graphs"] - before == 3
    assert losses(compiled) == losses(plain)
    torch.compiler.reset()  # nobody else shall run what was compiled here
    eager = train(tmp_path / "eager", "train.steps=2", *LARGE, *EVALUATE)
    found = [reports(folder)["step-00000002"]["metrics"]["FD-Corner"] for folder in (compiled, eager)]
    assert found[0] == pytest.approx(found[1], rel=0.05)
