"""SD3: which text encoders may be absent."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tread.errors import ConfigError
from tread.finetune.families.sd3 import SD3
from tread.finetune.model.source import Source


def test_texts_without_a_t5_end_in_zeros(pipeline_folder: Callable[[str], Path]) -> None:
    """Encoded with the text encoders alone in memory, as the cache does it."""
    family = SD3(Source(str(pipeline_folder("sd3-no-t5"))))
    (text,) = family.encode_text(family.source.pipeline(*family.text_parts), ["two dogs"])
    assert text["embeds"].shape == (77 + 256, 20)
    assert text["embeds"][:77, :16].abs().min() > 0
    assert text["embeds"][77:].abs().max() == 0


def test_a_missing_clip_is_named(pipeline_folder: Callable[[str], Path]) -> None:
    family = SD3(Source(str(pipeline_folder("sd3"))))
    pipeline = family.source.pipeline("tokenizer", "text_encoder", "tokenizer_2")
    with pytest.raises(ConfigError, match=r"has no text_encoder_2; only text_encoder_3 may be left out"):
        family.encode_text(pipeline, ["two dogs"])
