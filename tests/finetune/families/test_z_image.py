"""Z-Image: texts as a list, the scale of guidance, the direction of time, and turbo."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.finetune.tasks import make_config
from tests.finetune.trained import PROMPTS, drawn, opened, text_of
from tests.tiny.pictures import write_noise
from tread.errors import ConfigError
from tread.finetune.compat.translate import translate
from tread.finetune.families import open_family
from tread.finetune.families.z_image import ZImage
from tread.finetune.model.source import Source
from tread.finetune.preflight import open_model
from tread.finetune.starter import starter_config

Folder = Callable[[str], Path]


@pytest.fixture
def z_image(pipeline_folder: Folder) -> tuple[ZImage, Any]:
    return opened(pipeline_folder("z_image"), "z_image")


def test_each_text_of_a_batch_has_its_own_length(z_image: tuple[ZImage, Any]) -> None:
    """That of its chat, without padding."""
    family, pipeline = z_image
    batch = text_of(family, pipeline, [*PROMPTS, ""])
    lengths = [len(text) for text in batch.values()]
    assert lengths[0] > lengths[1] > lengths[2] > 0
    ids = pipeline.tokenizer([*PROMPTS, ""]).input_ids
    assert [length - len(words) for length, words in zip(lengths, ids, strict=True)] == [lengths[2]] * 3


def test_time_and_velocity_run_the_other_way(z_image: tuple[ZImage, Any]) -> None:
    """A model that gives x - noise, told that the data is at 1."""
    family, _ = z_image
    x, noise, time = drawn(2, 16, 4, 6), drawn(2, 16, 4, 6, seed=1), torch.tensor([0.25, 0.9])
    target = family.target(shift=None, distance="l2")

    def fake(*, x: list[Tensor], t: Tensor, **arguments: Any) -> tuple[list[Tensor]]:
        assert_close(t, torch.tensor([0.75, 0.1]))
        assert [image.shape for image in x] == [(16, 1, 4, 6)] * 2
        return (list((data - noise)[:, :, None]),)

    data = x
    model: Any = fake
    batch = {f"text.embeds.{i}": torch.zeros(3 + i, 16) for i in range(2)}
    prediction = family.predict(model, target.mix(x, noise, time), time, batch)
    assert target.error(prediction, x, noise, time).max() == 0


def test_any_scale_above_zero_guides(z_image: tuple[ZImage, Any]) -> None:
    """At scale 1 the pipeline still needs what it leads away from."""
    family, pipeline = z_image
    text, negative = family.encode_text(pipeline, ["a cat", "two dogs"])
    pipeline.set_progress_bar_config(disable=True)

    def draw(scale: float, **prompt: Any) -> Tensor:
        size: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 1, "guidance_scale": scale}
        return pipeline(**prompt, **size, generator=torch.Generator().manual_seed(0), output_type="latent").images

    expected = draw(1.0, prompt="a cat", negative_prompt="two dogs")
    assert family.unguided == 0
    assert_close(draw(1.0, **family.prompt_arguments(text, negative)), expected)
    assert (draw(0.0, **family.prompt_arguments(text, None)) - expected).abs().max() > 1e-3


def test_turbo_is_warned_of_by_its_name(pipeline_folder: Folder, tmp_path: Path) -> None:
    place = shutil.copytree(pipeline_folder("z_image"), tmp_path / "Z-Image-Turbo")
    data = write_noise(tmp_path / "data")
    with pytest.warns(UserWarning, match=r"Z-Image-Turbo' is distilled to a few steps, which training undoes"):
        family = open_model(make_config(place, data, model_family="z_image"))
    assert (family.steps, family.guidance) == (9, 0.0)
    with pytest.warns(UserWarning, match="is distilled"):
        starter_config("z_image", str(place), str(data))
    assert not open_family("z_image", Source(str(pipeline_folder("z_image")))).distilled


@pytest.mark.parametrize("flavour", [None, "ostris-de-turbo"])
def test_flavours_with_an_assistant_s_adapter_are_not_trained_without_it(flavour: str | None) -> None:
    """The default there is one of them."""
    config = {"model_family": "z_image", "model_flavour": flavour, "data_backend_config": [], "model_type": "lora"}
    (verdict,) = (one for one in translate(config).unsupported if one.key == "model_flavour")
    assert "which is not done here; choose base or turbo" in verdict.text


def test_another_text_encoder_is_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    place = shutil.copytree(pipeline_folder("z_image"), tmp_path / "model")
    config = place / "text_encoder" / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 16', '"hidden_size": 24'))
    with pytest.raises(ConfigError, match=r"text_encoder of .* width 24, but the transformer reads 16"):
        open_family("z_image", Source(str(place)))
