"""The layout of Wan's own `WanModel`, 2.1 and 2.2, and of its VACE.

Only names, signatures, the padding and where positions enter are those of the originals.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.tiny.case import Blocks, Case, random

WIDTH, HEADS, WORDS, LENGTH = 24, 2, 7, 21


def rope_apply(x: Tensor, grid_sizes: Tensor, freqs: Tensor) -> Tensor:
    """Turn x (B, L, H, D) by frame, row and column; the padding after each sample's tokens stays."""
    half = x.shape[-1] // 2
    tables = freqs.split([half - 2 * (half // 3), half // 3, half // 3], dim=1)
    samples = []
    for sample, sizes in zip(x, grid_sizes.tolist(), strict=True):
        positions = torch.cartesian_prod(*(torch.arange(size) for size in sizes))  # (S, 3)
        turn = torch.cat([table[positions[:, i]] for i, table in enumerate(tables)], dim=1)[:, None]  # (S, 1, D / 2)
        pairs = torch.view_as_complex(sample[: len(turn)].double().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * turn).flatten(2)
        samples.append(torch.cat((turned.to(sample.dtype), sample[len(turn) :])))
    return torch.stack(samples).float()


def attention(q: Tensor, k: Tensor, v: Tensor, k_lens: Tensor | None = None) -> Tensor:
    """(B, L, H, D) each; keys after a sample's own are not seen."""
    mask = None if k_lens is None else (torch.arange(k.shape[1]) < k_lens[:, None])[:, None, None]
    q, k, v = (t.transpose(1, 2).to(v.dtype) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class WanSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, seq_lens: Tensor, grid_sizes: Tensor, freqs: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        q, k = rope_apply(q, grid_sizes, freqs), rope_apply(k, grid_sizes, freqs)
        return self.o(attention(q, k, v, k_lens=seq_lens))


class WanCrossAttention(WanSelfAttention):
    def forward(self, x: Tensor, context: Tensor, context_lens: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v = (
            layer(y).unflatten(-1, (HEADS, -1)) for layer, y in ((self.q, x), (self.k, context), (self.v, context))
        )
        return self.o(attention(q, k, v, k_lens=context_lens))


class WanAttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = WanSelfAttention(), WanCrossAttention()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.modulation = nn.Parameter(torch.randn(1, 6, WIDTH))

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        seq_lens: Tensor,
        grid_sizes: Tensor,
        freqs: Tensor,
        context: Tensor,
        context_lens: Tensor | None,
    ) -> Tensor:
        e = e.unsqueeze(1) if e.ndim == 3 else e  # (B, 1 or L, 6, D)
        s1, m1, g1, s2, m2, g2 = (self.modulation + e).unbind(2)
        x = x + g1 * self.self_attn(self.norm1(x) * (1 + m1) + s1, seq_lens, grid_sizes, freqs)
        x = x + self.cross_attn(x, context, context_lens)
        return x + g2 * self.ffn(self.norm2(x) * (1 + m2) + s2)


class WanModel(nn.Module):
    """One timestep per sample (2.1), or `per_token` (2.2)."""

    _supports_gradient_checkpointing = True

    def __init__(self, block: Any = WanAttentionBlock, *, per_token: bool = False) -> None:
        super().__init__()
        self.patch_size, self.window_size, self.per_token = (1, 2, 2), (-1, -1), per_token
        self.patch_embedding = nn.Conv3d(4, WIDTH, kernel_size=self.patch_size, stride=self.patch_size)
        self.text_embedding = nn.Linear(16, WIDTH)
        self.time_embedding, self.time_projection = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 6 * WIDTH)
        self.blocks = nn.ModuleList(self.make(block, index) for index in range(3))
        self.head = nn.Linear(WIDTH, 16)
        angles = torch.outer(torch.arange(8), 0.3 ** torch.arange(WIDTH // HEADS // 2)).double()
        self.freqs = torch.polar(torch.ones_like(angles), angles)
        self._gradient_checkpointing_func: Any = None

    def make(self, block: Any, index: int) -> nn.Module:
        return block()

    def enable_gradient_checkpointing(self) -> None:
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def disable_gradient_checkpointing(self) -> None:
        self._gradient_checkpointing_func = None

    def run(self, block: nn.Module, x: Tensor, **kwargs: Any) -> Tensor:
        if self._gradient_checkpointing_func is None:
            return block(x, **kwargs)
        return self._gradient_checkpointing_func(block, x, **kwargs)

    def embed(self, samples: list[Tensor], layer: nn.Module, seq_len: int) -> tuple[Tensor, Tensor]:
        """Samples padded to one length, (B, L, D), and their grids, (B, 3)."""
        grids = [layer(sample.unsqueeze(0)) for sample in samples]
        tokens = [F.pad(grid.flatten(2).transpose(1, 2), (0, 0, 0, seq_len - grid[0, 0].numel())) for grid in grids]
        return torch.cat(tokens), torch.tensor([grid.shape[2:] for grid in grids])

    def arguments(self, grid_sizes: Tensor, t: Tensor, context: list[Tensor], seq_len: int) -> dict[str, Any]:
        t = t.unsqueeze(1).expand(-1, seq_len) if self.per_token and t.ndim == 1 else t
        words = torch.stack([F.pad(text, (0, 0, 0, WORDS - len(text))) for text in context])
        return {
            "e": self.time_projection(F.silu(self.time_embedding(t.unsqueeze(-1)))).unflatten(-1, (6, WIDTH)),
            "seq_lens": grid_sizes.prod(dim=1),
            "grid_sizes": grid_sizes,
            "freqs": self.freqs,
            "context": self.text_embedding(words),
            "context_lens": None,
        }

    def unpatchify(self, x: Tensor, grid_sizes: Tensor) -> list[Tensor]:
        out = []
        for sample, (frames, rows, columns) in zip(self.head(x), grid_sizes.tolist(), strict=True):
            patches = sample[: frames * rows * columns].view(frames, rows, columns, 2, 2, 4)
            out.append(patches.permute(5, 0, 1, 3, 2, 4).reshape(4, frames, 2 * rows, 2 * columns))
        return out

    def forward(
        self,
        x: list[Tensor],
        t: Tensor,
        context: list[Tensor],
        seq_len: int,
        clip_fea: Tensor | None = None,
        y: list[Tensor] | None = None,
    ) -> list[Tensor]:
        stream, grid_sizes = self.embed(x, self.patch_embedding, seq_len)
        kwargs = self.arguments(grid_sizes, t, context, seq_len)
        for block in self.blocks:
            stream = self.run(block, stream, **kwargs)
        return self.unpatchify(stream, grid_sizes)


class BaseWanAttentionBlock(WanAttentionBlock):
    def __init__(self, block_id: int | None) -> None:
        super().__init__()
        self.block_id = block_id

    def forward(self, x: Tensor, hints: list[Tensor], context_scale: float = 1.0, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = super().forward(x, **kwargs)
        return x if self.block_id is None else x + hints[self.block_id] * context_scale


class VaceWanModel(WanModel):
    """A control branch of its own layers gives hints to the first and the last layer."""

    def __init__(self) -> None:
        super().__init__(BaseWanAttentionBlock)
        self.vace_blocks = nn.ModuleList(WanAttentionBlock() for _ in range(2))
        self.vace_patch_embedding = nn.Conv3d(6, WIDTH, kernel_size=self.patch_size, stride=self.patch_size)

    def make(self, block: Any, index: int) -> nn.Module:
        return block({0: 0, 2: 1}.get(index))

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: list[Tensor],
        t: Tensor,
        vace_context: list[Tensor],
        context: list[Tensor],
        seq_len: int,
        vace_context_scale: float = 1.0,
    ) -> list[Tensor]:
        stream, grid_sizes = self.embed(x, self.patch_embedding, seq_len)
        control, _ = self.embed(vace_context, self.vace_patch_embedding, seq_len)
        kwargs = self.arguments(grid_sizes, t, context, seq_len)
        hints = []
        for block in self.vace_blocks:
            control = block(control, **kwargs)
            hints.append(control)
        kwargs |= {"hints": hints, "context_scale": vace_context_scale}
        for block in self.blocks:
            stream = self.run(block, stream, **kwargs)
        return self.unpatchify(stream, grid_sizes)


def inputs(batch: int) -> dict[str, Any]:
    return {
        "x": list(random(1, batch, 4, 3, 4, 6)),  # 3 frames of 2 x 3 tokens
        "t": torch.tensor([0.8, 0.3])[:batch],
        "context": [random(2, 1, 5, 16)[0], random(3, 1, 4, 16)[0]][:batch],
        "seq_len": LENGTH,
    }


def ti2v(batch: int) -> dict[str, Any]:
    """Every token has its own timestep."""
    return inputs(batch) | {"t": inputs(batch)["t"][:, None] * torch.linspace(0, 1, LENGTH)}


def vace(batch: int) -> dict[str, Any]:
    return inputs(batch) | {"vace_context": list(random(4, batch, 6, 3, 4, 6)), "vace_context_scale": 0.5}


def of_two_sizes(model: Any, batch: int) -> dict[str, Any]:
    return inputs(batch) | {"x": [random(1, 1, 4, 3, 4, 6)[0], random(1, 1, 4, 1, 4, 4)[0]]}


def looking_at_neighbours(model: Any, batch: int) -> dict[str, Any]:
    model.window_size = (4, 4)
    return inputs(batch)


BLOCKS = (Blocks(name="blocks", keyword="x", image="first", keys="first"),)
CASES = [
    Case(name="outside-wan", build=WanModel, inputs=inputs, blocks=BLOCKS, tokens=18, refused=looking_at_neighbours),
    Case(name="outside-wan-2.2", build=partial(WanModel, per_token=True), inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="outside-wan-ti2v", build=partial(WanModel, per_token=True), inputs=ti2v, blocks=BLOCKS, tokens=18),
    Case(name="outside-wan-vace", build=VaceWanModel, inputs=vace, blocks=BLOCKS, tokens=18),
]
