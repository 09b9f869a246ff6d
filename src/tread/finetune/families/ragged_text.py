"""Texts of different lengths: cut to what a mask keeps, and padded again in a batch.

- Padding is not worth its disk: a caption of 20 tokens would be stored as 300 or 512. What is cut is copied, because a
  part of a tensor holds on to the whole.
- A batch is as long as its longest text, with a mask of whole numbers as tokenizers give it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence


def cut(embeds: Tensor, mask: Tensor) -> list[Tensor]:
    """(B, L, D) with its mask (B, L), whose ones come first -> B texts of (l, D)."""
    return [text[:length].clone() for text, length in zip(embeds, mask.sum(-1).tolist(), strict=True)]


def padded(texts: Sequence[Tensor], multiple: int = 1) -> tuple[Tensor, Tensor]:
    """B texts of (l, D) -> zeros behind them, (B, L, D), and the mask, (B, L); L is a multiple of `multiple`."""
    masks = [torch.ones(len(text), dtype=torch.int64, device=text.device) for text in texts]
    embeds, mask = pad_sequence(list(texts), batch_first=True), pad_sequence(masks, batch_first=True)
    more = -mask.shape[1] % multiple
    return F.pad(embeds, (0, 0, 0, more)), F.pad(mask, (0, more))


def masked_prompt(text: Tensor, negative: Tensor | None) -> dict[str, Tensor]:
    """The arguments of pipelines that take embeds of one length (l, D) with their masks."""
    embeds, mask = padded([text] if negative is None else [text, negative])
    arguments = {"prompt_embeds": embeds[:1], "prompt_attention_mask": mask[:1]}
    if negative is not None:
        arguments |= {"negative_prompt_embeds": embeds[1:], "negative_prompt_attention_mask": mask[1:]}
    return arguments
