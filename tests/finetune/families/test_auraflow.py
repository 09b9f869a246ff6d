"""AuraFlow: texts are stored without padding, which changes nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from tread.finetune.families.auraflow import AuraFlow
from tread.finetune.model.source import Source


@pytest.fixture
def family(pipeline_folder: Callable[[str], Path]) -> AuraFlow:
    return AuraFlow(Source(str(pipeline_folder("auraflow"))))


def test_texts_are_stored_without_padding(family: AuraFlow) -> None:
    pipeline = family.source.pipeline(*family.text_parts)
    captions = ["", "two dogs", "a very long caption " * 100]
    texts = family.encode_text(pipeline, captions)
    lengths = [min(256, len(ids)) for ids in pipeline.tokenizer(captions).input_ids]
    assert [len(text["embeds"]) for text in texts] == lengths
    assert lengths[0] == 1
    assert lengths[2] == 256
    assert family.collate_text(texts)["embeds"].shape == (3, 256, 16)


def test_a_tokenizer_that_pads_on_the_left_makes_no_difference(family: AuraFlow) -> None:
    """The model gives text no positions, so where the zeros are is all one; the text itself is not."""
    pipeline = family.source.pipeline("transformer", *family.text_parts)
    pipeline.tokenizer.padding_side = "left"
    embeds = pipeline.encode_prompt(["two dogs"], do_classifier_free_guidance=False)[0]
    assert embeds[0, 0].abs().max() == 0
    ours = family.collate_text(family.encode_text(pipeline, ["two dogs"]))["embeds"]
    assert ours[0, 0].abs().max() > 0
    noisy, time = torch.randn(1, 4, 8, 8), torch.tensor([0.5])
    with torch.no_grad():
        found, stock, other = (
            family.predict(pipeline.transformer, noisy, time, {"text.embeds": text}) for text in (ours, embeds, -ours)
        )
    assert_close(found, stock, rtol=1e-4, atol=1e-5)
    assert (found - other).abs().max() > 1e-3
