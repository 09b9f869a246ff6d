"""Qwen-Image-Layered: layers in one target, transparency, times by one image's tokens, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from tests.finetune.tasks import make_config, make_task
from tests.finetune.trained import PROMPTS, drawn, opened
from tests.tiny.pipelines import PipelineFolder
from tests.tiny.pipelines.qwen_layered import taken_apart
from tread.data.captioned.buckets import Bucket, Crop
from tread.data.captioned.pixels import read_pixels
from tread.errors import ConfigError, TreadWarning
from tread.finetune.families import open_family
from tread.finetune.loss import LATENT, NOISE, TIME
from tread.finetune.model.source import Source
from tread.finetune.previews import check_image
from tread.finetune.run import finetune
from tread.finetune.starter import starter_config
from tread.finetune.target import FlowTarget
from tread.routing import noise

pytestmark = pytest.mark.filterwarnings("ignore::tread.routing.risks.RiskWarning")


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """Two posters, each with a background and a transparent layer of random pixels."""
    rng = np.random.default_rng(0)
    for folder in ("posters", "posters-layer-1", "posters-layer-2"):
        (tmp_path / folder).mkdir()
        for number in range(2):
            pixels = rng.integers(0, 256, (64, 64, 4), dtype=np.uint8)
            pixels[..., 3] |= 0 if folder == "posters-layer-2" else 255
            Image.fromarray(pixels).save(tmp_path / folder / f"{number}.png")
            (tmp_path / folder / f"{number}.txt").write_text(PROMPTS[number])
    layers = [str(tmp_path / f"posters-layer-{number}") for number in (1, 2)]
    given = {"conditioning_data_dir": layers, "conditioning_type": "reference"}
    return {"instance_data_dir": str(tmp_path / "posters"), "resolution": 64, **given}


def settings(tmp_path: Path) -> dict[str, Any]:
    return {"model_family": "qwen_layered", "cache_dir": str(tmp_path / "cache"), "output_dir": str(tmp_path / "run")}


def test_the_loss_is_that_of_the_stock_transformer(
    pipeline_folder: PipelineFolder, tmp_path: Path, data: dict[str, Any]
) -> None:
    """The image and its layers are one target, and the clean image comes after them."""
    place = pipeline_folder("qwen_layered")
    task = make_task(make_config(place, data, tread_config=None, train_batch_size=1, **settings(tmp_path)), tmp_path)
    batch = next(task.batches(1))
    assert task.facts["grid"] == [3, 4, 4]
    found = task.loss(task.model, batch)
    tensors, where, seed = batch.tensors, torch.tensor([1]), task.config.seed
    number = int(tensors["text.embeds"].shape[1] < 8)  # the second caption is the shorter one
    vae = task.family.source.pipeline("vae").vae
    folders = [data["instance_data_dir"], *data["conditioning_data_dir"]]
    mean = torch.stack([moments(vae, folder, number)[0] for folder in folders], dim=2)
    std = torch.stack([moments(vae, folder, number)[1] for folder in folders], dim=2)
    assert_close(tensors["mean"], mean, rtol=1e-3, atol=2e-3)  # cached in float16
    assert_close(tensors["std"], std, rtol=1e-3, atol=2e-3)
    assert mean.shape == (1, 16, 3, 8, 8)
    x = tensors["mean"] + tensors["std"] * noise.per_sample_normal(seed, where, mean.shape[1:], LATENT)
    normal = noise.per_sample_normal(seed, where, mean.shape[1:], NOISE)
    time = task.target.times(noise.uniform(seed, TIME, where), 16)
    noisy = (1 - time) * x + time * normal
    velocity = task.model(
        hidden_states=torch.cat([*(packed(noisy[:, :, i]) for i in range(3)), packed(tensors["mean"][:, :, 0])], dim=1),
        timestep=time,
        encoder_hidden_states=tensors["text.embeds"],
        img_shapes=[[(1, 4, 4)] * 4],
        additional_t_cond=torch.zeros(1, dtype=torch.long),
        return_dict=False,
    )[0]
    target = normal - x
    error = velocity[:, :48] - torch.cat([packed(target[:, :, i]) for i in range(3)], dim=1)
    assert_close(found, error.square().mean(), rtol=1e-5, atol=1e-6)


def packed(latents: Tensor) -> Tensor:
    return torch.nn.functional.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


@torch.no_grad()
def moments(vae: Any, folder: str, number: int) -> tuple[Tensor, Tensor]:
    """The latents of a file by the autoencoder alone, transparency included."""
    with Image.open(Path(folder) / f"{number}.png") as image:
        pixels = torch.from_numpy(np.array(image.convert("RGBA"))).float() / 127.5 - 1
    found = vae.encode(pixels.permute(2, 0, 1)[None, :, None]).latent_dist
    shift, scale = (torch.tensor(vae.config[name]).view(1, -1, 1, 1) for name in ("latents_mean", "latents_std"))
    return (found.mean[:, :, 0] - shift) / scale, found.std[:, :, 0] / scale


def test_transparency_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    pixels = np.full((8, 8, 4), (200, 100, 50, 0), dtype=np.uint8)
    pixels[:, 4:, 3] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "b.png")
    crop = Crop(Bucket(8, 8), 0.0, 0.0, 1.0, 1.0)
    assert np.array_equal(read_pixels(tmp_path / "a.png", crop, alpha=True)[0], pixels)
    assert (read_pixels(tmp_path / "a.png", crop)[0, :, :4] == 255).all(), "over white"
    assert (read_pixels(tmp_path / "b.png", crop, alpha=True)[0] == torch.tensor([255, 0, 0, 255])).all()


def test_times_are_shifted_as_by_the_stock_pipeline(
    pipeline_folder: PipelineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tokens of one image, whatever the number of layers."""
    family, pipeline = opened(pipeline_folder("qwen_layered"), "qwen_layered")
    pipeline.set_progress_bar_config(disable=True)
    told: list[float] = []
    set_timesteps = pipeline.scheduler.set_timesteps

    def keep(*args: Any, mu: float, **named: Any) -> None:
        told.append(mu)
        set_timesteps(*args, mu=mu, **named)

    keep.__signature__ = __import__("inspect").signature(set_timesteps)  # the pipeline looks for `sigmas`
    monkeypatch.setattr(pipeline.scheduler, "set_timesteps", keep)
    pixels = torch.zeros(1, 3, 1, 64, 96)
    pipeline(prompt="a cat", num_inference_steps=2, output_type="pt", **taken_apart(pixels))
    target: Any = family.target(shift=None, distance="l2")
    tokens = family.shifting_tokens(drawn(1, 16, 3, 8, 12))
    assert tokens == 24
    assert target.shift_of(tokens) == pytest.approx(np.exp(told[0]))
    fixed = family.target(shift=2.0, distance="l2")
    assert type(fixed) is FlowTarget
    assert fixed.shift == 2.0
    assert [family.exact_size(side, side)["resolution"] for side in (512, 640, 800, 900, 1024)] == [640] * 3 + [
        1024
    ] * 2


def test_a_preview_shows_the_layers(pipeline_folder: PipelineFolder, tmp_path: Path, data: dict[str, Any]) -> None:
    prompt = {"validation_prompt": "a cat", "validation_image": f"{data['instance_data_dir']}/0.png"}
    steps = {"max_train_steps": 1, "validation_num_inference_steps": 2, "report_to": "none", "eval_steps_interval": 0}
    place = pipeline_folder("qwen_layered")
    folder = finetune(make_config(place, data, **settings(tmp_path), **prompt, **steps))
    with Image.open(folder / "previews" / "step-00000001-0.png") as strip:
        assert strip.size == (2 * 64, 64) or strip.width == 2 * strip.height, "two layers side by side"
    card = (folder / "README.md").read_text()
    assert "    layers=2,\n" in card
    assert 'load_image("input.png").convert("RGBA")' in card


def test_what_is_refused(pipeline_folder: PipelineFolder, tmp_path: Path, data: dict[str, Any]) -> None:
    place = pipeline_folder("qwen_layered")
    alone = {name: value for name, value in data.items() if not name.startswith("conditioning")}
    with pytest.raises(ConfigError, match=r"trains on images with their layers, but 2 of 2 samples have no layers"):
        finetune(make_config(place, alone, **settings(tmp_path)))
    family = open_family("qwen_layered", Source(str(place)))
    images = [f"{data['instance_data_dir']}/{number}.png" for number in range(2)]
    config = make_config(place, data, **settings(tmp_path), validation_prompt="a cat", validation_image=images)
    with pytest.raises(ConfigError, match=r"validation_image has 2 images, but a QwenImageLayeredPipeline takes 1"):
        check_image(config, family)
    with pytest.raises(ConfigError, match="is a QwenImageLayeredPipeline: set model_family to 'qwen_layered'"):
        open_family("qwen_image", Source(str(place)))


def test_a_starter_takes_folders_of_layers(pipeline_folder: PipelineFolder, data: dict[str, Any]) -> None:
    place, photos = str(pipeline_folder("qwen_layered")), Path(data["instance_data_dir"])
    text = starter_config("qwen_layered", place, str(photos))
    assert all(folder in text for folder in data["conditioning_data_dir"])
    assert f"validation_image: {photos / '0.png'}" in text
    for folder in data["conditioning_data_dir"]:
        Path(folder).rename(f"{folder}-gone".replace("-layer-", "-other-"))
    with pytest.warns(TreadWarning, match=r"with their layers: put these, .* like \S+posters-layer-1, from the back"):
        starter_config("qwen_layered", place, str(photos))
