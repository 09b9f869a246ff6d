"""PixArt: the learned variance, masks, and the old class name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tread
from tests.finetune.trained import PROMPTS, drawn, opened, text_of, train_routed
from tread.errors import ConfigError
from tread.finetune.families.pixart_sigma import PixArtSigma
from tread.finetune.model.source import Source
from tread.finetune.target import EpsilonTarget


@pytest.fixture
def pixart(pipeline_folder: Callable[[str], Path]) -> tuple[PixArtSigma, Any]:
    return opened(pipeline_folder("pixart_sigma"), "pixart_sigma")


def test_training_lowers_the_dense_loss_and_moves_the_variance(pixart: tuple[PixArtSigma, Any]) -> None:
    """A few routed steps on fixed noise; the variance's own part of the last layer learns too."""
    family, pipeline = pixart
    target, model = family.target(shift=None, distance="l2"), pipeline.transformer.train()
    assert isinstance(target, EpsilonTarget)
    assert_close(target.betas.float(), pipeline.scheduler.betas)
    x, noise, time = drawn(2, 4, 8, 12), drawn(2, 4, 8, 12, seed=1), torch.tensor([600, 0])
    batch = text_of(family, pipeline, PROMPTS)
    handle = tread.attach(model, {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]})

    def loss() -> Tensor:
        prediction = family.predict(model, target.mix(x, noise, time), time, batch)
        assert prediction.shape == (2, 8, 8, 12)
        error = target.error(prediction, x, noise, time)
        assert error.shape == x.shape
        return error.mean()

    before = train_routed(model, handle, loss, steps=6)
    assert handle.selections[0].shape == (2, 12)
    variance = model.proj_out.bias.grad.view(2, 2, 8)[..., 4:]  # (rows, columns, channels) of a patch
    assert (variance != 0).all()
    with handle.dense():
        assert loss().item() < 0.9 * before


def test_texts_are_stored_without_padding(pixart: tuple[PixArtSigma, Any]) -> None:
    family, pipeline = pixart
    captions = ["", *PROMPTS, "a very long caption " * 100]
    lengths = [min(300, len(ids)) for ids in pipeline.tokenizer(captions).input_ids]
    assert [len(text["embeds"]) for text in family.encode_text(pipeline, captions)] == lengths
    assert lengths[-1] == 300


def test_a_flow_shift_is_refused(pixart: tuple[PixArtSigma, Any]) -> None:
    with pytest.raises(ConfigError, match=r"flow_schedule_shift is 3.0, but the model is no flow model.*leave it out"):
        pixart[0].target(shift=3.0, distance="l2")


def test_folders_with_the_old_class_name_load(pipeline_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The released PixArt sigma calls its transformer Transformer2DModel."""
    shutil.copytree(pipeline_folder("pixart_sigma"), tmp_path, dirs_exist_ok=True)
    index, config = (tmp_path / name for name in ("model_index.json", "transformer/config.json"))
    index.write_text(index.read_text().replace("PixArtTransformer2DModel", "Transformer2DModel"))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_class_name": "Transformer2DModel"}))
    model = Source(str(tmp_path)).transformer("transformer", dtype=torch.float32)
    assert type(model).__name__ == "PixArtTransformer2DModel"
