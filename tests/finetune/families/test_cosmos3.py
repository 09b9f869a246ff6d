"""Cosmos 3: tokens that tell the size, the given first frame, the loss by hand, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from tests.finetune.tasks import make_config, make_task
from tests.finetune.trained import PROMPTS, changed, drawn, opened, recorded, text_of
from tests.tiny.pictures import write_clips
from tests.tiny.pipelines import PipelineFolder
from tests.tiny.pipelines.case import to_image
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.loss import LATENT, NOISE, TIME
from tread.finetune.model.source import Source
from tread.finetune.preflight import check_batch, check_dtypes, open_model
from tread.finetune.run import finetune
from tread.routing import noise

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_caption_is_followed_by_the_size_and_the_length_of_its_sample(pipeline_folder: PipelineFolder) -> None:
    """As the stock pipeline writes them, for the latents that the caption comes with."""
    family, pipeline = opened(pipeline_folder("cosmos3"), "cosmos3")
    text = text_of(family, pipeline, ["two dogs"])
    for frames, expected in (
        (1, "This image is of 64x96 resolution."),
        (3, "The video is 0.4 seconds long and is of 24 FPS. This video is of 64x96 resolution."),
    ):
        batch = family.collated(text | {"mean": torch.zeros(1, 48, frames, 4, 6)})
        assert "text.caption" not in batch
        (ids,) = batch["text.ids"]
        told = pipeline.text_tokenizer.decode(ids)
        assert f"two dogs. {expected}<|im_end|>" in told
        assert f"generate {'images' if frames == 1 else 'videos'}" in told
        size = {"num_frames": 1 + 4 * (frames - 1), "height": 64, "width": 96, "fps": 24.0}
        assert ids.tolist() == pipeline.tokenize_prompt("two dogs", **size)[0]


def test_a_given_first_frame_is_that_of_the_stock_pipeline(pipeline_folder: PipelineFolder) -> None:
    """Every tensor of the first call; it is clean and has no time."""
    source = Source(str(pipeline_folder("cosmos3")))
    family, pipeline = open_family("cosmos3", source, first_frame=True), source.pipeline(*source.parts)
    pipeline.set_progress_bar_config(disable=True)
    clip = torch.randint(256, (1, 3, 5, 64, 96), generator=torch.Generator().manual_seed(0)) / 127.5 - 1
    size = {"height": 64, "width": 96, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 1.0}
    with recorded(pipeline.transformer) as stock:
        pipeline(
            PROMPTS[0],
            image=to_image(clip),
            **size,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )
    batch = family.collated(family.encode_pixels(pipeline, clip) | text_of(family, pipeline, PROMPTS[:1]))
    noisy = torch.randn(batch["mean"].shape, generator=torch.Generator().manual_seed(0))
    time = stock[0]["vision_timesteps"][:1] / 1000
    with torch.no_grad(), recorded(pipeline.transformer) as ours:
        velocity = family.predict(pipeline.transformer, noisy, time, batch)
    assert ours[0].keys() == stock[0].keys()
    for name, value in ours[0].items():
        assert_close(value, stock[0][name], check_dtype="timestep" not in name, msg=name)
    assert ours[0]["vision_timesteps"].shape == (2 * 3,), "those of the second latent frame alone"
    assert torch.equal(ours[0]["vision_tokens"][0][:, :, 0], batch["mean"][:, :, 0])
    assert (velocity[:, :, 0] == 0).all()
    weight = family.weight(batch)
    assert weight is not None
    assert weight[0, 0].flatten(1).mean(1).tolist() == [0, 1]
    image: Any = {"mean": batch["mean"][:, :, :1]}
    assert family.weight(image) is None, "a single image is drawn from text"
    assert family.takes_image
    assert not open_family("cosmos3", source).takes_image


def test_the_text_half_stays_as_it_is(pipeline_folder: PipelineFolder) -> None:
    """A LoRA is on the attention of video alone."""
    family, pipeline = opened(pipeline_folder("cosmos3"), "cosmos3")
    linears = [name for name, module in pipeline.transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    adapted = [name for name in linears if name.endswith(tuple(f".{target}" for target in family.lora_targets))]
    assert {name.split(".")[-1] for name in adapted} == {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    assert len(adapted) == 4 * 4


def test_the_loss_is_that_of_the_stock_transformer(pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    data = {"instance_data_dir": str(write_clips(tmp_path / "clips")), "resolution": 64, "video": {"num_frames": 5}}
    place = pipeline_folder("cosmos3")
    folders = {"cache_dir": str(tmp_path / "cache"), "tread_config": None}
    task = make_task(
        make_config(place, data, model_family="cosmos3", train_batch_size=1, framerate=12, **folders), tmp_path
    )
    batch = next(task.batches(2))
    found = task.loss(task.model, batch)
    where, seed = torch.tensor([2]), task.config.seed
    tensors = batch.tensors
    x = tensors["mean"] + tensors["std"] * noise.per_sample_normal(seed, where, tensors["mean"].shape[1:], LATENT)
    normal = noise.per_sample_normal(seed, where, x.shape[1:], NOISE)
    time = task.target.times(noise.uniform(seed, TIME, where), 8)
    (ids,) = tensors["text.ids"]
    words = len(ids)
    grid = torch.cartesian_prod(torch.arange(2.0), torch.arange(2.0), torch.arange(2.0)).T
    grid[0] = grid[0] * 2 + words + 15000  # twice as slow as the base of 24 frames per second
    tokens = torch.arange(words, words + 8)
    (velocity,), _, _ = task.model(
        input_ids=ids,
        text_indexes=torch.arange(words),
        position_ids=torch.cat([torch.arange(float(words)).expand(3, -1), grid], dim=1),
        und_len=words,
        sequence_length=words + 8,
        vision_tokens=[(1 - time) * x + time * normal],
        vision_token_shapes=[(2, 2, 2)],
        vision_sequence_indexes=tokens,
        vision_mse_loss_indexes=tokens,
        vision_timesteps=(1000 * time).expand(8),
        vision_noisy_frame_indexes=[torch.arange(2)],
        return_dict=False,
    )
    assert_close(found, (velocity - (normal - x)).square().mean(), rtol=1e-5, atol=1e-6)


def test_a_preview_is_drawn_from_the_prompt_as_written(pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    data = {"instance_data_dir": str(write_clips(tmp_path / "clips")), "resolution": 64, "video": {"num_frames": 5}}
    folders = {"output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache"), "report_to": "none"}
    shown = {"validation_prompt": "two dogs, and émile", "validation_num_inference_steps": 1}
    steps = {"model_family": "cosmos3", "train_batch_size": 1, "max_train_steps": 1, "eval_steps_interval": 0}
    place = pipeline_folder("cosmos3")
    folder = finetune(make_config(place, data, **folders, **shown, **steps))
    with Image.open(folder / "previews" / "step-00000001-0.webp") as drawn_frames:
        assert (drawn_frames.n_frames, drawn_frames.size) == (5, (64, 64))  # pyright: ignore[reportAttributeAccessIssue]
    family = open_family("cosmos3", Source(str(place)))
    text, negative = family.encode_text(None, [shown["validation_prompt"], ""])
    arguments = {"prompt": shown["validation_prompt"], "negative_prompt": ""}
    assert family.prompt_arguments(text, negative) == arguments


def test_what_is_refused(pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    place = pipeline_folder("cosmos3")
    source = Source(str(place))
    with pytest.raises(
        ConfigError, match=r"tokenizer_max_length is 77, but a Cosmos3OmniPipeline reads captions whole"
    ):
        open_family("cosmos3", source, 77)
    with pytest.raises(ConfigError, match="is a Cosmos3OmniPipeline: set model_family to 'cosmos3'"):
        open_family("cosmos25", source)
    config = make_config(place, tmp_path, model_family="cosmos3")
    family = open_model(config)
    with pytest.raises(
        ConfigError, match=r"train_batch_size is 2, but the model of cosmos3 reads one sample at a time"
    ):
        check_batch(config, family)
    whole = {"model_type": "full", "mixed_precision": "bf16", "train_batch_size": 1}
    with pytest.raises(ConfigError, match=r"mixed_precision is bf16 and the weights of cosmos3 are float32"):
        check_dtypes(make_config(place, tmp_path, model_family="cosmos3", **whole), family)
    check_dtypes(make_config(place, tmp_path, model_family="cosmos3", **(whole | {"model_type": "lora"})), family)
    check_dtypes(make_config(place, tmp_path, model_family="cosmos3", **(whole | {"mixed_precision": "no"})), family)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_weights_under_autocast_are_as_the_check_says(pipeline_folder: PipelineFolder, weights: torch.dtype) -> None:
    """In float32 the stock forward fails: if it ever does not, `one_dtype` can go."""
    family, pipeline = opened(pipeline_folder("cosmos3"), "cosmos3")
    model = pipeline.transformer.to(weights)
    batch = family.collated({"mean": drawn(1, 48, 2, 4, 4)} | text_of(family, pipeline, PROMPTS[:1]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        if weights == torch.float32:
            with pytest.raises(RuntimeError, match="dtype"):
                family.predict(model, batch["mean"], torch.tensor([0.5]), batch)
        else:
            assert family.predict(model, batch["mean"], torch.tensor([0.5]), batch).shape == batch["mean"].shape


def test_encoding_needs_no_guardrail(pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    """A released pipeline insists on one that it does not bring; the card names the package."""
    place = changed(pipeline_folder("cosmos3"), tmp_path / "m", "model_index.json", enable_safety_checker=True)
    source = Source(str(place))
    family = open_family("cosmos3", source)
    assert family.packages == ("cosmos_guardrail",)
    with pytest.raises((ConfigError, ImportError), match="cosmos_guardrail"):
        source.pipeline(*family.pixel_parts)
    pipeline = source.pipeline(*family.pixel_parts, given=family.stand_ins())
    assert family.encode_pixels(pipeline, torch.zeros(1, 3, 1, 64, 64))["mean"].shape == (1, 48, 1, 4, 4)
    assert open_family("cosmos3", Source(str(pipeline_folder("cosmos3")))).packages == ()
