"""Krea 2: padding in the middle of a text, the select layers of its index, and the distilled model's shift."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.finetune.tasks import make_config
from tests.finetune.trained import PROMPTS, changed, drawn, opened, text_of
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.families.krea2 import Krea2
from tread.finetune.model.source import Source
from tread.finetune.preflight import open_model
from tread.finetune.target import FlowTarget

Folder = Callable[[str], Path]


@pytest.fixture
def krea(pipeline_folder: Folder) -> tuple[Krea2, Any]:
    return opened(pipeline_folder("krea2"), "krea2")


@torch.no_grad()
def test_texts_are_stored_without_their_padding(krea: tuple[Krea2, Any]) -> None:
    """The caption and, after the pipeline's padding, the end of its template: three layers of each token."""
    family, pipeline = krea
    texts = family.encode_text(pipeline, [*PROMPTS, ""])
    embeds, mask = pipeline.encode_prompt([*PROMPTS, ""])
    assert embeds.shape == (3, 512, 3, 16)
    for text, row, given in zip(texts, embeds, mask, strict=True):
        kept = text["embeds"]
        assert kept.shape == (int(given.sum()), 3, 16)
        assert_close(kept[-5:], row[-5:])  # the template's end
        assert_close(kept[:-5], row[: len(kept) - 5])
    lengths = [len(text["embeds"]) for text in texts]
    assert lengths[0] > lengths[1] > lengths[2] >= 5


@torch.no_grad()
def test_padding_changes_nothing(krea: tuple[Krea2, Any]) -> None:
    """Compiled code pads texts further, along their tokens and not along their layers."""
    family, pipeline = krea
    noisy, time = drawn(2, 16, 4, 6), torch.tensor([0.3, 0.8])
    plain = text_of(family, pipeline, PROMPTS)
    family.text_multiple = 64
    longer = text_of(family, pipeline, PROMPTS)
    assert longer["text.embeds"].shape == (2, 64, 3, 16)
    found, expected = (family.predict(pipeline.transformer, noisy, time, batch) for batch in (longer, plain))
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_index_chooses_the_layers(krea: tuple[Krea2, Any]) -> None:
    """A list in model_index.json that names no part is a setting of the pipeline."""
    family, _ = krea
    encoders = family.source.pipeline(*family.text_parts)
    assert encoders.text_encoder_select_layers == (1, 2, 4)
    assert encoders.transformer is None


def test_a_distilled_model_has_one_shift(krea: tuple[Krea2, Any], pipeline_folder: Folder, tmp_path: Path) -> None:
    """That of the pipeline's scheduler at a mu of 1.15; the raw model's grows with the tokens."""
    place = changed(pipeline_folder("krea2"), tmp_path / "m", "model_index.json", is_distilled=True)
    with pytest.warns(UserWarning, match="is distilled to a few steps"):
        family = open_model(make_config(place, "data", model_family="krea2"))
    assert (family.steps, family.guidance) == (8, 0.0)
    target, raw = (one.target(shift=None, distance="l2") for one in (family, krea[0]))
    levels = torch.tensor([0.9, 0.5, 0.1])
    scheduler = krea[1].scheduler
    for tokens in (24, 4096):
        scheduler.set_timesteps(sigmas=levels.tolist(), mu=1.15)
        assert_close(target.times(torch.special.ndtr(torch.logit(levels)), tokens), scheduler.sigmas[:3])
    assert isinstance(raw, FlowTarget)
    assert raw.shift_of(6400) == pytest.approx(math.exp(1.15))
    assert raw.shift_of(256) == pytest.approx(math.exp(0.5))


def test_another_text_encoder_is_refused(pipeline_folder: Folder, tmp_path: Path) -> None:
    folder = pipeline_folder("krea2")
    text = json.loads((folder / "text_encoder/config.json").read_text())["text_config"]
    place = changed(folder, tmp_path / "m", "text_encoder/config.json", text_config=text | {"hidden_size": 24})
    with pytest.raises(ConfigError, match=r"text_encoder of .* width 24, but the transformer reads 16"):
        open_family("krea2", Source(str(place)))
