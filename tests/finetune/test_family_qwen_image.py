"""Qwen-Image: masks that are made only where they are needed, packing, and the adapter in the stock loader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tread.finetune.families.qwen_image import QwenImage

from .trained import PROMPTS, drawn, opened, save_lora, text_of

pytestmark = pytest.mark.realdata


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
    assert text_of(family, pipeline, ["one cat", "one dog"]).keys() == {"text.embeds"}


@torch.no_grad()
def test_texts_in_a_batch_are_read_as_if_alone(qwen: tuple[QwenImage, Any]) -> None:
    family, pipeline = qwen
    noisy, time = drawn(2, 16, 4, 6), torch.tensor([0.25, 0.9])
    together = family.predict(pipeline.transformer, noisy, time, text_of(family, pipeline, PROMPTS))
    for i in range(2):
        alone = text_of(family, pipeline, PROMPTS[i : i + 1])
        one = family.predict(pipeline.transformer, noisy[i : i + 1], time[i : i + 1], alone)
        assert_close(one, together[i : i + 1], rtol=1e-4, atol=1e-5)


def test_patches_come_back_where_they_were(qwen: tuple[QwenImage, Any]) -> None:
    noisy, seen = drawn(2, 16, 4, 6), []

    def fake(*, hidden_states: Tensor, img_shapes: Any, **arguments: Any) -> tuple[Tensor]:
        seen.append((hidden_states.shape, img_shapes))
        return (hidden_states,)

    model: Any = fake
    batch = {"text.embeds": torch.zeros(2, 3, 16)}
    assert torch.equal(qwen[0].predict(model, noisy, torch.tensor([0.25, 0.9]), batch), noisy)
    assert seen == [((2, 6, 64), [[(1, 2, 3)], [(1, 2, 3)]])]


@torch.no_grad()
def test_the_lora_loads_in_the_stock_pipeline(qwen: tuple[QwenImage, Any], tmp_path: Path) -> None:
    family, pipeline = qwen
    fresh = family.source.pipeline("transformer")
    batch, noisy, time = text_of(family, pipeline, PROMPTS), drawn(2, 16, 4, 6), torch.tensor([0.25, 0.9])
    before = family.predict(fresh.transformer.eval(), noisy, time, batch)
    model = save_lora(family, pipeline, tmp_path)["transformer"]
    fresh.load_lora_weights(tmp_path)
    after = family.predict(fresh.transformer.eval(), noisy, time, batch)
    assert_close(after, family.predict(model.eval(), noisy, time, batch))
    assert (after - before).abs().max() > 1e-3
