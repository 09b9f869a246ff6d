"""An independent computation of a routed forward: no gather, no rope knowledge, nothing of `tread`.

The stock layers run at full length. Inside a window, attention cannot see the keys of dropped tokens, and after each
layer the dropped tokens' rows are put back as they were before it: they skip the layer. What a model adds to the
stream between layers, such as ControlNet's residuals, reaches every token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from case import Blocks, Case
from torch import Tensor, nn
from torch.nn import functional as F

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
    with mock.patch.object(F, "scaled_dot_product_attention", attend):
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _Run:
    def __init__(self, case: Case, windows: list[Window]) -> None:
        self.case, self.windows = case, windows
        self.kept: Tensor | None = None
        self.entry: Tensor | None = None
        self.blocks: Blocks | None = None

    def _image(self, length: int, where: str, batch: int) -> Tensor:
        """Places of the image tokens on an axis, (B, S)."""
        tokens = self.case.tokens
        if length == tokens:
            start = torch.zeros(batch, dtype=torch.int64)
        elif self.case.offsets is not None:
            start = torch.tensor(self.case.offsets(batch))
        else:
            start = torch.full((batch,), 0 if where == "first" else length - tokens)
        return start[:, None] + torch.arange(tokens)

    def before(self, index: int, blocks: Blocks) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.blocks = blocks
            for first, last, kept in self.windows:
                if first <= index <= last:
                    self.kept = kept
                    stream = kwargs[blocks.keyword] if blocks.keyword in kwargs else args[blocks.stream]
                    place = self._image(stream.shape[1], blocks.image, stream.shape[0])
                    self.entry = torch.stack([sample[rows] for sample, rows in zip(stream, place, strict=True)])

        return hook

    def after(self, index: int, blocks: Blocks) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if self.kept is None or self.entry is None:
                return None
            stream = output if blocks.returns is None else output[blocks.returns]
            place = self._image(stream.shape[1], blocks.image, stream.shape[0])
            samples = []
            for sample, rows, kept, entry in zip(stream, place, self.kept, self.entry, strict=True):
                sample = sample.clone()
                sample[rows[~kept]] = entry[~kept].to(sample.dtype)
                samples.append(sample)
            self.kept = self.entry = None
            stream = torch.stack(samples)
            if blocks.returns is None:
                return stream
            return (*output[: blocks.returns], stream, *output[blocks.returns + 1 :])

        return hook

    def attention(self, stock: Any) -> Any:
        def attend(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
        ) -> Tensor:
            length = key.shape[2]
            joint = length >= self.case.tokens and query.shape[2] == length
            if self.kept is None or self.blocks is None or not joint:
                return stock(query, key, value, attn_mask=attn_mask, **options)
            batch = key.shape[0]
            place = self._image(length, self.blocks.keys, batch)
            hidden = torch.zeros(batch, length, dtype=torch.bool).scatter(1, place, ~self.kept)[:, None, None, :]
            bias = torch.zeros(batch, 1, 1, length).masked_fill(hidden, -torch.inf)
            if attn_mask is not None:
                given = attn_mask
                if given.dtype == torch.bool:
                    given = torch.zeros_like(given, dtype=torch.float32).masked_fill(~given, -torch.inf)
                bias = bias + given
            return stock(query, key, value, attn_mask=bias.to(query.dtype), **options)

        return attend
