"""Lumina-Image 2.0: the system prompt, captions of different lengths, and time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.finetune.trained import PROMPTS, drawn, opened
from tread.finetune.families.lumina2 import Lumina2


@pytest.fixture
def lumina(pipeline_folder: Callable[[str], Path]) -> tuple[Lumina2, Any]:
    return opened(pipeline_folder("lumina2"), "lumina2")


@torch.no_grad()
def test_no_caption_is_what_the_pipeline_leads_away_from(lumina: tuple[Lumina2, Any]) -> None:
    """Captions follow the system prompt, an empty one does not."""
    family, pipeline = lumina
    caption, empty = family.encode_text(pipeline, [PROMPTS[0], ""])
    embeds, mask, negative, negative_mask = pipeline.encode_prompt(PROMPTS[0], negative_prompt="")
    assert_close(caption["embeds"], embeds[0][mask[0].bool()])
    assert_close(empty["embeds"], negative[0][negative_mask[0].bool()])
    assert len(caption["embeds"]) > 20 > len(empty["embeds"])


def test_time_and_velocity_run_the_other_way(lumina: tuple[Lumina2, Any]) -> None:
    """A model that gives x - noise, told that the data is at 1."""
    family, _ = lumina
    x, noise, time = drawn(2, 16, 4, 6), drawn(2, 16, 4, 6, seed=1), torch.tensor([0.25, 0.9])
    target = family.target(shift=None, distance="l2")

    def fake(*, timestep: Tensor, **arguments: Any) -> tuple[Tensor]:
        assert_close(timestep, torch.tensor([0.75, 0.1]))
        return (x - noise,)

    batch = {"text.embeds": torch.zeros(2, 3, 16), "text.mask": torch.ones(2, 3)}
    model: Any = fake
    prediction = family.predict(model, target.mix(x, noise, time), time, batch)
    assert target.error(prediction, x, noise, time).max() == 0
