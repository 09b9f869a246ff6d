"""A finished run opened again: `tread sample` on pixels and on latents, and what it refuses."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tiny.runs import draw, train, write_images, write_latents
from tread.cli import main
from tread.data import Digits
from tread.data.dataset import to_uint8
from tread.data.vae import load_vae
from tread.errors import CheckpointError, ConfigError
from tread.pretrain.sample import open_run, parse_classes, parse_seeds, sample_run
from tread.sampling.grid import make_grid
from tread.sampling.guidance import Branches
from tread.training.checkpoint import save
from tread.training.parts import load_part


def pixels(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))}


def test_sample_writes_pngs_and_a_grid(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The inference script runs. The files are what `generate` gives for the averaged weights."""
    arguments = f"sample {trained} --classes 0-2 --per-class 2 --guidance 1.5 --steps 3 --seed 7 --out {tmp_path}/out"
    main(arguments.split())
    found = pixels(tmp_path / "out")
    cost, grid = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"0\.0\d+ GFLOPs a sample: cfg 1\.5, 3 steps", cost)
    assert grid == f"grid: {tmp_path}/out/grid.png"

    run, labels = open_run(trained), torch.tensor([0, 0, 1, 1, 2, 2])
    expected = Digits.to_images(draw(run, labels, seed=7, guidance=1.5))
    names = [f"{label:04d}-{i:05d}.png" for label in range(3) for i in range(2)]
    assert [*found] == [*names, "grid.png"]
    for name, image in zip(names, expected.squeeze(-1).numpy(), strict=True):
        assert (found[name] == image).all()
    assert (found["grid.png"] == np.asarray(make_grid(expected, columns=2))).all()
    with pytest.warns(UserWarning, match=r"out also holds 4 images of other calls, which `tread eval` would count"):
        sample_run(trained, classes="0-1", per_class=1, steps=1, out=tmp_path / "out")


def test_many_samples_are_written_batch_by_batch_and_some_are_shown(trained: Path, tmp_path: Path) -> None:
    """What 50,000 images for FID need: nothing of that size is held, and the grid stays one to look at."""
    sample_run(trained, classes="0-1", per_class=12, steps=1, batch_size=5, out=tmp_path / "many")
    sample_run(trained, classes="0-1", per_class=12, steps=1, batch_size=24, out=tmp_path / "once")
    many, once = pixels(tmp_path / "many"), pixels(tmp_path / "once")
    assert len(many) == 25
    assert all((many[name] == once[name]).all() for name in many)
    first = [many[f"{label:04d}-{i:05d}.png"] for label in range(2) for i in range(10)]
    expected = make_grid(torch.from_numpy(np.stack(first)).unsqueeze(-1), columns=10)
    assert (many["grid.png"] == np.asarray(expected)).all()


@pytest.mark.parametrize("options", ["--guidance 1.5", "--guidance-kind cfg+sg --weak-ratio 0.5 --guidance 3"])
def test_one_image_per_seed(trained: Path, tmp_path: Path, options: str) -> None:
    """The image of a seed is the first that this seed draws alone, in whatever range and batch it is."""
    main(f"sample {trained} --seeds 3-14 --batch-size 5 --steps 3 {options} --out {tmp_path}/many".split())
    many = pixels(tmp_path / "many")
    assert [*many] == [*(f"{seed:06d}.png" for seed in range(3, 15)), "grid.png"]
    for seed in (3, 9, 14):
        one = f"--classes {seed % 10} --per-class 1 --seed {seed}"
        main(f"sample {trained} {one} --steps 3 {options} --out {tmp_path}/{seed}".split())
        assert (pixels(tmp_path / str(seed))[f"{seed % 10:04d}-00000.png"] == many[f"{seed:06d}.png"]).all()
    main(f"sample {trained} --seeds 14,9-10 --batch-size 1 --steps 3 {options} --out {tmp_path}/few".split())
    few = pixels(tmp_path / "few")
    assert [*few] == ["000009.png", "000010.png", "000014.png", "grid.png"]
    assert all((few[name] == many[name]).all() for name in few if name != "grid.png")
    shown = torch.from_numpy(np.stack([image for name, image in many.items() if name != "grid.png"])).unsqueeze(-1)
    assert (many["grid.png"] == np.asarray(make_grid(shown, columns=10))).all()


def test_seeds_take_turns_in_the_classes_that_are_named(trained: Path, tmp_path: Path) -> None:
    sample_run(trained, seeds="0-3", classes="7,2", steps=2, out=tmp_path)
    found = pixels(tmp_path)
    for seed, label in enumerate((7, 2, 7, 2)):
        expected = draw(open_run(trained), torch.tensor([label]), seed=seed, steps=2, guidance=1.5)
        assert (found[f"{seed:06d}.png"] == Digits.to_images(expected)[0].squeeze(-1).numpy()).all()


def test_samples_are_drawn_in_the_precision_of_the_run(tmp_path: Path) -> None:
    """As the run's own previews are; another precision is an option."""
    pictures = ["sample.every=20", "sample.classes=2", "sample.per_class=2", "sample.steps=3"]
    learning = [
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=1e-2",
    ]  # a new model predicts zero in any precision
    folder = train(tmp_path / "run", "train.steps=20", "train.precision=bf16", *pictures, *learning)
    preview = (folder / "samples" / "step-00000020.png").read_bytes()
    grids = {
        given: sample_run(folder, classes="0-1", per_class=2, precision=given, out=tmp_path / str(given)).read_bytes()
        for given in (None, "bf16", "float32")
    }
    assert grids[None] == grids["bf16"] == preview != grids["float32"]


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "5-3", "1,,2", "1.5", "²", "9" * 5000])
def test_seeds_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match=r"; write seeds and ranges, e\.g\. 0-49999 or 1,5,7-8\.$"):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["4294967296", "0-4294967296", "0-10000000", "0-999999999999999999999"])
def test_seeds_that_are_too_many_or_too_large(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_seeds(text)
    assert str(error.value) == f"--seeds is {text!r}; allowed are at most 10,000,000 seeds, all below 2^32."
    assert len(parse_seeds("4294967295,0-9999998")) == 10_000_000


def test_sample_defaults_are_the_runs(trained: Path, tmp_path: Path) -> None:
    """Guidance 1.5 and 40 steps as in its config, the first ten classes, its own folder."""
    copy = shutil.copytree(trained, tmp_path / "run")
    assert sample_run(copy, per_class=1) == copy / "generated" / "grid.png"
    sample_run(copy, classes="0-9", per_class=1, guidance=1.5, steps=40, solver="euler", out=tmp_path / "same")
    sample_run(copy, classes="0-9", per_class=1, guidance=3.0, steps=40, out=tmp_path / "other")
    default, same, other = (pixels(folder) for folder in (copy / "generated", tmp_path / "same", tmp_path / "other"))
    assert len(default) == 11
    assert all((default[name] == same[name]).all() for name in default)
    assert any((default[name] != other[name]).any() for name in default)


def test_weights_of_the_model_or_of_the_average(trained: Path) -> None:
    path = trained / "checkpoints" / "step-00000006"
    for weights in ("ema", "model"):
        run = open_run(trained, averaged=weights == "ema")
        for name, tensor in run.model.state_dict().items():
            assert torch.equal(tensor, load_part(path, weights)[name])
        assert not run.model.training
        assert (run.step, run.num_classes, run.shape) == (6, 10, (1, 8, 8))


@pytest.mark.parametrize(
    ("options", "branches"),
    [
        ("--guidance-kind sg", Branches(kind="sg", weak_ratio=0.7)),
        (
            "--guidance-kind ag+sg --strong-ratio 0.25 --weak-ratio 0.5 --ratio-schedule cosine --weak {earlier}",
            Branches(kind="ag+sg", strong_ratio=0.25, weak_ratio=0.5, schedule="cosine"),
        ),
    ],
)
def test_sample_with_another_guidance(trained: Path, tmp_path: Path, options: str, branches: Branches) -> None:
    """The routes are those of the checkpoint; an earlier checkpoint is the weak model."""
    earlier = trained / "checkpoints" / "step-00000003"
    drawn = "--classes 0-2 --per-class 1 --guidance 3 --steps 3"
    main(f"sample {trained} {drawn} {options.format(earlier=earlier)} --out {tmp_path}".split())
    run, weak = open_run(trained), open_run(earlier)
    assert (run.step, weak.step) == (6, 3)
    assert run.plan is not None
    for each in (run, weak):
        each.model.route(run.plan)
    weaker = weak.model if branches.needs_weak else None
    expected = Digits.to_images(draw(run, torch.arange(3), guidance=3.0, branches=branches, weak=weaker))
    found = pixels(tmp_path)
    for label, image in enumerate(expected.squeeze(-1).numpy()):
        assert (found[f"{label:04d}-00000.png"] == image).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--guidance -1", "--guidance is -1.0; it must be a finite number of at least 0."),
        ("--guidance nan", "--guidance is nan; it must be a finite number of at least 0."),
        ("--guidance inf", "--guidance is inf; it must be a finite number of at least 0."),
        ("--interval 0.7 0.1", "--interval is (0.7, 0.1); its lower end must be below its upper end."),
        ("--interval nan 1", "--interval is (nan, 1.0); its lower end must be below its upper end."),
        ("--churn nan", "--churn is nan; it must be a finite number of at least 0."),
        ("--churn-interval 2 1", "--churn-interval is (2.0, 1.0); its lower end must be below its upper end."),
        ("--seeds 0-3 --seed 1", "--seeds draws one image for each seed, so --seed says nothing; leave it out."),
        (
            "--seeds 0-3 --per-class 1",
            "--seeds draws one image for each seed, so --per-class says nothing; leave it out.",
        ),
        ("--seeds 3-0", "--seeds is '3-0'; write seeds and ranges, e.g. 0-49999 or 1,5,7-8."),
        ("--strong-ratio nan", "strong ratio is nan; it must be a number with 0 <= value < 1."),
        ("--guidance-kind sg --weak-ratio -0.1", "weak ratio is -0.1; allowed is 0 <= value < 1."),
    ],
)
def test_numbers_that_mean_nothing_are_refused_before_a_folder_is_made(
    trained: Path, tmp_path: Path, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["sample", str(trained), *options.split(), "--out", str(tmp_path / "none")])
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)
    assert not (tmp_path / "none").exists()


def test_guidance_that_a_run_cannot_have(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--guidance-kind ag needs --weak: a lesser run, or an .*checkpoints\.$"):
        sample_run(trained, per_class=1, guidance_kind="ag")
    with pytest.raises(ConfigError, match=r"^--guidance-kind sg has no use for --weak; leave it out\.$"):
        sample_run(trained, per_class=1, guidance_kind="sg", weak=trained)
    dense = train(tmp_path / "dense", "model.tread_config=null", "train.steps=1")
    with pytest.raises(ConfigError, match=r"guidance is to drop tokens, but .*/dense was trained without routes"):
        sample_run(dense, per_class=1, guidance_kind="sg")
    with pytest.raises(ConfigError, match=r"guidance is to drop tokens, but .*/dense was trained without routes"):
        sample_run(trained, per_class=1, guidance_kind="ag+sg", weak=dense)
    edm = train(tmp_path / "edm", "objective=edm", "train.steps=1")
    with pytest.raises(ConfigError, match=r"^--weak was trained for another task: objective "):
        sample_run(trained, per_class=1, guidance_kind="ag", weak=edm)


def test_neither_the_data_nor_the_first_weights_need_to_be_there(tmp_path: Path) -> None:
    shards = write_latents(tmp_path / "shards" / "0.tar").parent
    folder = train(tmp_path / "run", "data=latents", f"data.path={shards}", "data.num_classes=3", "train.steps=1")
    shutil.rmtree(shards)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("weights: null", "weights: /gone.pt"))
    assert open_run(folder).num_classes == 3


@pytest.mark.parametrize(
    ("text", "labels"), [("0-2", [0, 1, 2]), ("7", [7]), ("1, 5,7-8", [1, 5, 7, 8]), ("3-3,3", [3, 3])]
)
def test_classes(text: str, labels: list[int]) -> None:
    assert parse_classes(text, 10) == labels


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "5-3", "1,,2", "1.5", "²"])
def test_classes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_classes(text, 10)
    assert str(error.value) == f"--classes is {text!r}; write labels and ranges, e.g. 0-9 or 1,5,207."


@pytest.mark.parametrize(("text", "label"), [("10", 10), ("3,0-10", 10), ("0-999999999999", 999999999999)])
def test_classes_the_run_does_not_know(text: str, label: int) -> None:
    with pytest.raises(ConfigError) as error:
        parse_classes(text, 10)
    assert str(error.value) == f"--classes names class {label}; this run knows classes 0-9."


def test_refusals(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--per-class is 0; it must be at least 1\.$"):
        sample_run(trained, per_class=0)
    with pytest.raises(ConfigError, match=r"^--batch-size is 0; it must be at least 1\.$"):
        sample_run(trained, per_class=1, batch_size=0)
    with pytest.raises(ConfigError, match=r"^--seed is -1; it must be at least 0\.$"):
        sample_run(trained, per_class=1, seed=-1)
    with pytest.raises(ConfigError, match=r"^--vae is given, but this run was trained on pixels; leave it out\.$"):
        sample_run(trained, per_class=1, vae="somewhere")
    with pytest.raises(ConfigError, match=r"^cannot write to '.*/grid\.png/sub': Not a directory\. Name another"):
        sample_run(trained, per_class=1, steps=1, out=sample_run(trained, per_class=1, steps=1, out=tmp_path) / "sub")
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it has no config\.yaml\.$"):
        sample_run(tmp_path, per_class=1)
    (tmp_path / "config.yaml").write_text((trained / "config.yaml").read_text())
    with pytest.raises(CheckpointError) as error:
        sample_run(tmp_path, per_class=1)
    assert str(error.value) == f"{tmp_path} has no checkpoint yet; train it first."


def make_vae(folder: Path, latent_channels: int) -> str:
    """A random AutoencoderKL that halves each side."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    torch.manual_seed(0)
    model = AutoencoderKL(
        block_out_channels=(8, 16),  # pyright: ignore[reportArgumentType]
        down_block_types=("DownEncoderBlock2D",) * 2,  # pyright: ignore[reportArgumentType]
        up_block_types=("UpDecoderBlock2D",) * 2,  # pyright: ignore[reportArgumentType]
        norm_num_groups=4,
        latent_channels=latent_channels,
    )
    model.save_pretrained(folder)
    return str(folder)


def test_a_latent_run_with_and_without_a_vae(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = write_latents(tmp_path / "shards" / "0.tar").parent
    run = train(tmp_path / "run", "data=latents", f"data.path={shards}", "data.num_classes=3", "train.steps=2")
    drawn = {"classes": "0,2", "per_class": 2, "steps": 2, "guidance": 1.0, "batch_size": 3}
    capsys.readouterr()

    sample_run(run, **drawn, out=tmp_path / "raw")
    assert "no --vae given: the pictures show the first latent channels, not images." in capsys.readouterr().out
    assert {image.shape for name, image in pixels(tmp_path / "raw").items() if name != "grid.png"} == {(4, 4, 3)}

    vae = make_vae(tmp_path / "vae", 4)
    sample_run(run, **drawn, vae=vae, out=tmp_path / "decoded")
    samples = draw(open_run(run), torch.tensor([0, 0, 2, 2]), shape=(4, 4, 4), steps=2, null_label=3)
    expected = to_uint8(load_vae(vae, device="cpu").decode(samples / 0.18215)).int()  # SD's factor, unscaled
    images = [image for name, image in pixels(tmp_path / "decoded").items() if name != "grid.png"]
    assert (torch.from_numpy(np.stack(images)).int() - expected).abs().max() <= 1
    assert expected.shape == (4, 8, 8, 3)

    with pytest.raises(ConfigError, match=r"vae2 has 8 latent channels and this run 4; give the run's VAE\.$"):
        sample_run(run, **drawn, vae=make_vae(tmp_path / "vae2", 8), out=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_weights_that_are_no_numbers_draw_nothing(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    weights = load_part(run / "checkpoints" / "step-00000006", "ema")
    weights["patch_embed.weight"][0, 0] = float("nan")
    facts = {"shape": [1, 8, 8], "num_classes": 10, "tread_config": None}
    save(run / "checkpoints", 7, {"ema": weights}, facts, keep=3)
    with pytest.raises(CheckpointError, match=r"ema\.safetensors has NaN or infinite weights \(1 tensor,"):
        sample_run(run, per_class=1, steps=1)


def test_a_changed_byte_is_refused_by_its_file(trained: Path, tmp_path: Path) -> None:
    """The checkpoint is named by its own folder, so there is no earlier one to fall back to."""
    folder = shutil.copytree(trained, tmp_path / "run") / "checkpoints" / "step-00000006"
    content = bytearray((folder / "ema.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "ema.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is not whole: the content of ema\.safetensors has changed"):
        sample_run(folder, per_class=1, steps=1)


def test_classes_have_names(tmp_path: Path) -> None:
    """They are kept in the run: its data may be gone."""
    data = write_images(tmp_path / "data", "cat", "dog", size=8)
    settings = ["data=images", f"data.path={data}", "data.size=8", "validation.samples=2", "train.steps=1"]
    run = train(tmp_path / "run", *settings)
    shutil.rmtree(data)
    named = sample_run(run, classes="dog", per_class=1, steps=1, out=tmp_path / "named")
    assert [path.name for path in (tmp_path / "named").glob("0*")] == ["0001-00000.png"]
    plain = make_grid(torch.from_numpy(np.asarray(Image.open(tmp_path / "named" / "0001-00000.png")))[None], columns=1)
    grid = Image.open(named)
    assert grid.height == plain.height
    margin = np.asarray(grid)[:, : grid.width - plain.width]
    assert margin.size > 0
    assert margin.min() < 64 < margin.max(), "there is a name beside the row"
    with pytest.raises(ConfigError, match="or names of classes: cat, dog"):
        sample_run(run, classes="bird", per_class=1)
