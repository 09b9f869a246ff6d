"""HiDream: texts of four encoders, answers in patches, sizes that are not square, and a folder without its Llama."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from tests.finetune.tasks import make_config
from tests.finetune.trained import PROMPTS, changed, drawn, opened, text_of
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.families.hidream import HiDream
from tread.finetune.model.source import Source
from tread.finetune.preflight import look
from tread.finetune.target import FlowTarget

Folder = Callable[[str], Path]


@pytest.fixture
def hidream(pipeline_folder: Folder) -> tuple[HiDream, Any]:
    return opened(pipeline_folder("hidream"), "hidream")


@torch.no_grad()
def test_a_text_is_every_layer_of_llama_and_three_more(hidream: tuple[HiDream, Any]) -> None:
    family, pipeline = hidream
    batch = text_of(family, pipeline, PROMPTS)
    assert batch["text.llama"].shape == (3, 2, 128, 16)
    ids = pipeline.tokenizer_4(PROMPTS, padding="max_length", max_length=128, return_tensors="pt")
    states = pipeline.text_encoder_4(**ids, output_hidden_states=True).hidden_states
    assert_close(batch["text.llama"], torch.stack(states[1:]))
    assert batch["text.t5"].shape == (2, 128, 20)
    assert batch["text.pooled"].shape == (2, 32)


@pytest.mark.parametrize("size", [(8, 8), (8, 12), (12, 8)])
@torch.no_grad()
def test_answers_of_training_are_those_of_sampling(hidream: tuple[HiDream, Any], size: tuple[int, int]) -> None:
    """In training the model answers in patches, padded unless they are a square."""
    family, pipeline = hidream
    model = pipeline.transformer
    batch, noisy, time = text_of(family, pipeline, PROMPTS), drawn(2, 16, *size), torch.tensor([0.3, 0.8])
    sampled = family.predict(model.eval(), noisy, time, batch)
    trained = family.predict(model.train(), noisy, time, batch)
    assert trained.shape == noisy.shape
    assert_close(trained, sampled, rtol=1e-4, atol=1e-5)


def test_the_velocity_runs_the_other_way(hidream: tuple[HiDream, Any]) -> None:
    family, _ = hidream
    x, noise, time = drawn(2, 16, 4, 6), drawn(2, 16, 4, 6, seed=1), torch.tensor([0.25, 0.9])
    target = family.target(shift=None, distance="l2")

    def fake(*, timesteps: Tensor, **arguments: Any) -> tuple[Tensor]:
        assert_close(timesteps, torch.tensor([250.0, 900.0]))
        return (x - noise,)

    model: Any = fake
    batch = {f"text.{name}": torch.zeros(2, 3, 16) for name in ("t5", "llama", "pooled")}
    prediction = family.predict(model, target.mix(x, noise, time), time, batch)
    assert target.error(prediction, x, noise, time).max() == 0


def test_grids_that_are_not_square_have_a_limit(hidream: tuple[HiDream, Any], tmp_path: Path) -> None:
    """64 tokens here, which is 128 x 128 pixels; found before anything is encoded."""
    family, pipeline = hidream
    assert family.unfit(512, 512, 1) is None
    assert family.unfit(64, 256, 1) is None
    with pytest.raises(RuntimeError):  # the stock model, at one row more
        family.predict(pipeline.transformer, drawn(1, 16, 8, 34), torch.ones(1), text_of(family, pipeline, ["a"]))
    (tmp_path / "data").mkdir()
    Image.new("RGB", (272, 64)).save(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "a.txt").write_text("a cat")
    data = {"instance_data_dir": str(tmp_path / "data"), "resolution": 144, "resolution_type": "pixel_area"}
    config = make_config(Path(family.source.name_or_path), tmp_path / "data", model_family="hidream")
    (problem,) = look(replace(config, data=data)).problems
    assert problem.endswith(
        "cannot train a HiDreamImagePipeline: 288 x 64 pixels are 72 tokens and it takes 64 unless the sides are "
        "equal: set resolution below 128 with resolution_type 'pixel_area', or crop to squares."
    )
    assert look(replace(config, data=data | {"resolution": 112})).problems == []


def test_a_folder_without_llama_is_told_how_to_get_it(hidream: tuple[HiDream, Any], tmp_path: Path) -> None:
    """As it is released: the index names no Llama, or one that is not there."""
    path = hidream[0].source.name_or_path
    absent = changed(path, tmp_path / "absent", "model_index.json", text_encoder_4=[None, None])
    shutil.rmtree(shutil.copytree(path, tmp_path / "lost") / "text_encoder_4")
    for folder in (absent, tmp_path / "lost"):
        with pytest.raises(ConfigError, match=r"lacks tokenizer_4 or text_encoder_4: HiDream's Llama.*docs/models.md"):
            open_family("hidream", Source(str(folder)))


def test_other_encoders_and_distilled_models(hidream: tuple[HiDream, Any], tmp_path: Path) -> None:
    path = hidream[0].source.name_or_path
    other = changed(path, tmp_path / "other", "text_encoder_4/config.json", hidden_size=24)
    with pytest.raises(ConfigError, match=r"text_encoder_4 of .* width 24, but the transformer reads 16"):
        open_family("hidream", Source(str(other)))
    scheduler = {"_class_name": "FlowMatchLCMScheduler", "shift": 6.0}
    dev = open_family(
        "hidream", Source(str(changed(path, tmp_path / "d", "scheduler/scheduler_config.json", **scheduler)))
    )
    assert dev.distilled
    assert (dev.steps, dev.guidance) == (28, 1.0)
    assert not hidream[0].distilled
    for family, shift in ((dev, 6.0), (hidream[0], 3.0)):
        target = family.target(shift=None, distance="l2")
        assert isinstance(target, FlowTarget)
        assert target.shift_of(24) == shift
