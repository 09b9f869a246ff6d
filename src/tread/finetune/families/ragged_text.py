"""Text embeddings of different lengths: `cut` removes the padding before they are cached, `padded` batches them again.

- Padding is not cached: a caption of 20 tokens would be stored as 300 or 512. `cut` copies, because a slice keeps the
  whole tensor in memory.
- A batch is as long as its longest text, with an int64 mask like those of tokenizers.
- `MaskedText` and `FilledText` are base classes of families: those whose model takes that mask, and those whose model
  takes none and reads zeros up to `text_length`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tread.errors import ConfigError
from tread.finetune.family import Batch, Text, TuneFamily


def cut(embeds: Tensor, mask: Tensor) -> list[Tensor]:
    """Embeddings (B, L, D) and their mask (B, L), whose ones come first -> B texts of (l, D)."""
    return [text[:length].clone() for text, length in zip(embeds, mask.sum(-1).tolist(), strict=True)]


def padded(texts: Sequence[Tensor], multiple: int = 1) -> tuple[Tensor, Tensor]:
    """B texts of (l, ...) -> embeddings (B, L, ...), padded with zeros, and a mask (B, L); `multiple` divides L."""
    masks = [torch.ones(len(text), dtype=torch.int64, device=text.device) for text in texts]
    embeds, mask = pad_sequence(list(texts), batch_first=True), pad_sequence(masks, batch_first=True)
    more = -mask.shape[1] % multiple
    return F.pad(embeds, (*(0, 0) * (embeds.ndim - 2), 0, more)), F.pad(mask, (0, more))


def filled(text: Tensor, length: int) -> Tensor:
    """A text (l, D) followed by zeros, (length, D)."""
    return F.pad(text, (0, 0, 0, length - len(text)))


def check_one_length(family: str, texts: Sequence[Tensor]) -> None:
    """Refuse texts (l, D) of different lengths, for a model that would read their padding."""
    lengths = {len(text) for text in texts}
    if len(lengths) > 1:
        raise ConfigError(
            f"a batch of {family} has texts of {min(lengths)} and {max(lengths)} tokens, but the model would read "
            "their padding: set train_batch_size to 1 and raise gradient_accumulation_steps."
        )


class FilledText(TuneFamily):
    """Base class of families whose model reads texts at full length, without a mask."""

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        return {"embeds": torch.stack([filled(text["embeds"], self.text_length) for text in texts])}  # (B, L, D)


class MaskedText(TuneFamily):
    """Base class of families whose texts differ in length and have a mask."""

    texts_differ = True

    def collate_text(self, texts: Sequence[Text]) -> Batch:
        embeds, mask = padded([text["embeds"] for text in texts], self.text_multiple)
        return {"embeds": embeds, "mask": mask}

    def prompt_arguments(self, text: Text, negative: Text | None) -> dict[str, Any]:
        return masked_prompt(text["embeds"], None if negative is None else negative["embeds"])


def masked_prompt(text: Tensor, negative: Tensor | None) -> dict[str, Tensor]:
    """Pipeline arguments for a prompt (l, D) and its negative, padded to one length, with their masks."""
    embeds, mask = padded([text] if negative is None else [text, negative])
    arguments = {"prompt_embeds": embeds[:1], "prompt_attention_mask": mask[:1]}
    if negative is not None:
        arguments |= {"negative_prompt_embeds": embeds[1:], "negative_prompt_attention_mask": mask[1:]}
    return arguments
