"""Captions longer than a model reads: stock pipelines cut them off, and only log it.

A text is counted as cut off if each of the pipeline's tokenizers makes more tokens of it than are read, so FLUX's CLIP
encoder, which reads 77 of any caption, is no reason by itself.
"""

from collections.abc import Sequence
from typing import Any

from tread.errors import shown


class LongTexts:
    """Counts the captions that are cut off after `length` tokens; None: captions are read whole."""

    def __init__(self, length: int | None) -> None:
        self.length = length
        self.found: list[tuple[str, int]] = []
        """The captions, each with its number of tokens."""

    def add(self, pipeline: Any, captions: Sequence[str]) -> None:
        """Add those of the captions that the pipeline cuts off."""
        from transformers import PreTrainedTokenizerBase

        parts = [getattr(part, "tokenizer", part) for part in pipeline.components.values()]
        tokenizers = [part for part in parts if isinstance(part, PreTrainedTokenizerBase)]
        if self.length is None or not tokenizers:
            return
        for caption in captions:
            tokens = min(len(tokenizer(caption).input_ids) for tokenizer in tokenizers)
            if tokens > self.length:
                self.found.append((caption, tokens))


def told(found: Sequence[tuple[str, int]], length: int | None) -> str:
    """The message about captions that are cut off."""
    caption, tokens = found[0]
    which = "1 caption has" if len(found) == 1 else f"{len(found)} captions have"
    return (
        f"{which} more than the {length} tokens that are read, so the end is cut off (the first has {tokens}: "
        f"{shown(caption, 60)}): shorten it, or raise tokenizer_max_length if the model allows it."
    )
