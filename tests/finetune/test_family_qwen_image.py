"""Qwen-Image: masks that are made only where they are needed, and packing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.finetune.trained import PROMPTS, drawn, opened, text_of
from tread.finetune.families.qwen_image import QwenImage


@pytest.fixture
def qwen(pipeline_folder: Callable[[str], Path]) -> tuple[QwenImage, Any]:
    return opened(pipeline_folder("qwen_image"), "qwen_image")


@torch.no_grad()
def test_a_mask_is_made_where_lengths_differ(qwen: tuple[QwenImage, Any]) -> None:
    """As the pipeline makes it; a text alone has none."""
    family, pipeline = qwen
    batch = text_of(family, pipeline, PROMPTS)
    embeds, mask = pipeline.encode_prompt(PROMPTS)
    assert torch.equal(batch["text.mask"], mask)
    assert_close(batch["text.embeds"], embeds)
    assert text_of(family, pipeline, ["a photo", "a picture"]).keys() == {"text.embeds"}


def test_patches_come_back_where_they_were(qwen: tuple[QwenImage, Any]) -> None:
    noisy, seen = drawn(2, 16, 4, 6), []

    def fake(*, hidden_states: Tensor, img_shapes: Any, **arguments: Any) -> tuple[Tensor]:
        seen.append((hidden_states.shape, img_shapes))
        return (hidden_states,)

    model: Any = fake
    batch = {"text.embeds": torch.zeros(2, 3, 16)}
    assert torch.equal(qwen[0].predict(model, noisy, torch.tensor([0.25, 0.9]), batch), noisy)
    assert seen == [((2, 6, 64), [[(1, 2, 3)], [(1, 2, 3)]])]
