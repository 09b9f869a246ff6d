"""A small model with what makes recomputation hard, its family, and its oracle.

It has a learned rope table that all samples share, a per-token modulation with a gradient, and a mask over keys, all of
them side inputs; text that joins the stream halfway; and, on demand, one module that is two layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tread

WIDTH, TOKENS, TEXT, DEPTH = 8, 12, 3, 6


class Block(nn.Module):
    """Attention and a linear layer over (B, L, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, c: Tensor, rope: Tensor | None = None, mod: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Stream (B, L, D), condition (B, D), rope (L, D) or (B, L, D), mod (B, L, D), mask (B, L) of keys to add."""
        q, k, v = self.qkv(x * (1 + self.scale(c).unsqueeze(1))).chunk(3, dim=-1)
        if rope is not None:
            q, k = q * torch.cos(rope), k * torch.cos(rope)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5  # (B, L, L)
        if mask is not None:
            scores = scores + mask.unsqueeze(1)
        attended = scores.softmax(-1) @ v
        if mod is not None:
            attended = attended * (1 + mod)
        return x + torch.tanh(self.out(attended))


Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Stream, condition, rope, mod, mask."""
Form = Callable[[Any, Arguments], Tensor]
"""Runs layers one after another on the stream and its other arguments."""


def plain(blocks: Any, arguments: Arguments) -> Tensor:
    """No checkpointing."""
    x, *rest = arguments
    for block in blocks:
        x = block(x, *rest)
    return x


class Toy(nn.Module):
    """Half of the layers see image tokens, the other half text before them."""

    def __init__(self, *, joined: bool = True, shared: bool = False, form: Form = plain) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [Block() for _ in range(DEPTH)]
        if shared:
            blocks[4] = blocks[1]
        self.first, self.second = nn.ModuleList(blocks[:3]), nn.ModuleList(blocks[3:])
        self.embed, self.text, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Parameter(torch.randn(TEXT + TOKENS, WIDTH))
        self.joined, self.form = joined, form

    def forward(self, x: Tensor, c: Tensor, text: Tensor) -> Tensor:
        """Tokens (B, S, D), condition (B, D), text (B, T, D) -> (B, S, D)."""
        x = self.embed(x)
        rope, mod = self.table[TEXT:], torch.sin(x.roll(1, dims=1))
        mask = torch.zeros(x.shape[:2], device=x.device)
        mask[:, -1] = -1.0
        x = self.form(self.first, (x, c, rope, mod, mask))
        if self.joined:
            text = self.text(text)
            x = torch.cat((text, x), dim=1)
            rope, mod = self.table, torch.cat((text, mod), dim=1)
            mask = torch.cat((torch.zeros_like(text[..., 0]), mask), dim=1)
        x = self.form(self.second, (x, c, rope, mod, mask))
        return self.head(x[:, -TOKENS:])


SIDES = (tread.Side(name="rope", dim=0), tread.Side(name="mod", dim=1), tread.Side(name="mask", dim=1))
FAMILY = tread.Family(
    models=("Toy",),
    stacks=tuple(tread.Stack(name=name, stream="x", sides=SIDES) for name in ("first", "second")),
    tokens=lambda model, arguments: arguments["x"].shape[1],
)


def inputs(batch: int = 2, seed: int = 0, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Arguments of the model; the stream has a gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (TOKENS, WIDTH), "c": (WIDTH,), "text": (TEXT, WIDTH)}
    made = {name: torch.randn(batch, *shape, generator=generator).to(device) for name, shape in shapes.items()}
    made["x"].requires_grad_()
    return made


def by_hand(model: Toy, arguments: dict[str, Tensor], windows: Sequence[tuple[int, int, Tensor]]) -> Tensor:
    """The oracle: layers at full length that cannot see dropped keys, and dropped rows put back after each."""

    index = 0

    def run(blocks: Any, given: Arguments) -> Tensor:
        nonlocal index
        x, c, rope, mod, mask = given
        for block in blocks:
            hidden, kept = mask, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            for first, last, tokens in windows:
                if first <= index <= last:
                    kept = torch.cat((kept[:, : -tokens.shape[1]], tokens), dim=1)
                    hidden = mask.masked_fill(~kept, -torch.inf)
            x = torch.where(kept.unsqueeze(-1), block(x, c, rope, mod, hidden), x)
            index += 1
        return x

    form, model.form = model.form, run
    try:
        return model(**arguments)
    finally:
        model.form = form
