"""An independent computation of a routed forward: no gather, no rope knowledge, nothing of `tread`.

The stock layers run at full length. Inside a window, attention cannot see the keys of dropped tokens, and after each
layer the dropped tokens' rows are put back as they were before it: they skip the layer. What a model adds to the
stream between layers, such as ControlNet's residuals, reaches every token. Layers that are compiled run eagerly here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from tests.tiny.case import Blocks, Case, Where

Window = tuple[int, int, Tensor]
"""First layer, last layer, kept (B, S) bool."""


@contextmanager
def oracle(case: Case, model: nn.Module, windows: list[Window]) -> Iterator[None]:
    """Inside, forwards of `model` are routed by hand."""
    run = _Run(case, windows)
    hooks = []
    for index, (blocks, layer) in enumerate(case.layers(model)):
        hooks.append(layer.register_forward_pre_hook(run.before(index, blocks), with_kwargs=True))
        hooks.append(layer.register_forward_hook(run.after(index, blocks)))
    attend = run.attention(F.scaled_dot_product_attention)
    scores = run.scores(Attention.get_attention_scores)
    with (
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        mock.patch.object(Attention, "get_attention_scores", scores),
        torch.compiler.set_stance("force_eager"),
    ):
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _batched(stream: Tensor, blocks: Blocks) -> Tensor:
    """The stream as (B, L, D)."""
    if stream.ndim == 2:
        return stream.unsqueeze(0)
    return stream.transpose(0, 1) if blocks.dim == 0 else stream


class _Run:
    def __init__(self, case: Case, windows: list[Window]) -> None:
        self.case, self.windows = case, windows
        self.kept: Tensor | None = None
        self.entry: Tensor | None = None
        self.blocks: Blocks | None = None
        self.sample = 0

    def _image(self, length: int, where: Where, batch: int, device: torch.device) -> Tensor:
        """Places of the image tokens on an axis, (B, S)."""
        tokens = self.case.tokens
        if length == tokens:
            start = torch.zeros(batch, dtype=torch.int64, device=device)
        elif self.case.offsets is not None:
            start = torch.tensor(self.case.offsets(batch), device=device)
            if start.ndim == 2:
                return start
        else:
            first = 0 if where == "first" else length - tokens if where == "last" else where
            start = torch.full((batch,), first, device=device)
        return start[:, None] + torch.arange(tokens, device=device)

    def before(self, index: int, blocks: Blocks) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.blocks, self.sample = blocks, 0
            for first, last, kept in self.windows:
                if first <= index <= last:
                    self.kept = kept
                    stream = kwargs[blocks.keyword] if blocks.keyword in kwargs else args[blocks.stream]
                    stream = _batched(stream, blocks)
                    place = self._image(stream.shape[1], blocks.image, stream.shape[0], stream.device)
                    self.entry = torch.stack([sample[rows] for sample, rows in zip(stream, place, strict=True)])

        return hook

    def after(self, index: int, blocks: Blocks) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if self.kept is None or self.entry is None:
                return None
            given = output if blocks.returns is None else output[blocks.returns]
            stream = _batched(given, blocks)
            place = self._image(stream.shape[1], blocks.image, stream.shape[0], stream.device)
            samples = []
            for sample, rows, kept, entry in zip(stream, place, self.kept, self.entry, strict=True):
                sample = sample.clone()
                sample[rows[~kept]] = entry[~kept].to(sample.dtype)
                samples.append(sample)
            self.kept = self.entry = None
            stream = samples[0] if given.ndim == 2 else torch.stack(samples, dim=1 - blocks.dim)
            if blocks.returns is None:
                return stream
            return (*output[: blocks.returns], stream, *output[blocks.returns + 1 :])

        return hook

    def _bias(self, batch: int, queries: int, length: int) -> Tensor | None:
        """What to add to the logits of an attention so that dropped keys are not seen, (B, 1, 1, L), if any are."""
        if self.kept is None or self.blocks is None:
            return None
        joint = self.case.tokens if self.blocks.image_queries else length - self.blocks.cached
        # keys that are the image tokens alone may be looked at by others, such as audio
        if length != self.case.tokens and (length < self.case.tokens or queries != joint):
            return None
        kept = self.kept
        if batch == 1 < kept.shape[0]:  # a model that attends sample by sample
            kept = kept[self.sample % kept.shape[0]].unsqueeze(0)
            self.sample += 1
        place = self._image(length, self.blocks.keys, batch, kept.device)
        hidden = torch.zeros(batch, length, dtype=torch.bool, device=kept.device).scatter(1, place, ~kept)
        return torch.zeros_like(hidden, dtype=torch.float32).masked_fill(hidden, -torch.inf)[:, None, None, :]

    def scores(self, stock: Any) -> Any:
        """The same for the older attention of diffusers, which has (B * heads, S, D) and no SDPA."""

        def attend(attention: Attention, query: Tensor, key: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            bias = self._bias(key.shape[0] // attention.heads, query.shape[1], key.shape[1])
            if bias is None:
                return stock(attention, query, key, attention_mask)
            bias = bias[:, 0].repeat_interleave(attention.heads, dim=0)  # (B * heads, 1, L)
            return stock(attention, query, key, bias if attention_mask is None else bias + attention_mask)

        return attend

    def attention(self, stock: Any) -> Any:
        def attend(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
        ) -> Tensor:
            bias = self._bias(key.shape[0], query.shape[2], key.shape[2])
            if bias is None:
                return stock(query, key, value, attn_mask, *rest, **options)
            if attn_mask is not None:
                given = attn_mask
                if given.dtype == torch.bool:
                    given = torch.zeros_like(given, dtype=torch.float32).masked_fill(~given, -torch.inf)
                bias = bias + given
            return stock(query, key, value, bias.to(query.dtype), *rest, **options)

        return attend
