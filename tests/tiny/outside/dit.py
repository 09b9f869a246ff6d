"""The layout of the DiT and SiT of their authors, of LightningDiT with its rope, and of SiT with REPA's projectors.

Only names and signatures are those of the originals: a layer here is one modulated attention.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.tiny.case import Blocks, Case, random

WIDTH, HEADS, SIZE = 32, 2, 6


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(4, WIDTH, kernel_size=2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(1, WIDTH)

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(t.unsqueeze(1) / 1000)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rope: Any = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, H, S, D) each
        if rope is not None:
            q, k = rope(q), rope(k)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.adaLN_modulation = nn.Linear(WIDTH, 2 * WIDTH)

    def run(self, x: Tensor, c: Tensor, rope: Any = None) -> Tensor:
        scale, gate = self.adaLN_modulation(c).unsqueeze(1).chunk(2, dim=-1)
        return x + gate * F.gelu(self.attn(self.norm1(x) * (1 + scale), rope))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.run(x, c)


class LightningDiTBlock(DiTBlock):
    def forward(self, x: Tensor, c: Tensor, feat_rope: Any = None) -> Tensor:
        return self.run(x, c, feat_rope)


class Rope(nn.Module):
    """Turns x (B, H, S, D) by a table for all S tokens, and no other number of them."""

    freqs_cos: Tensor
    freqs_sin: Tensor

    def __init__(self, tokens: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(tokens), 0.5 ** torch.arange(WIDTH // HEADS // 2)).repeat(1, 2)
        self.register_buffer("freqs_cos", angles.cos(), persistent=False)
        self.register_buffer("freqs_sin", angles.sin(), persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        first, second = t.chunk(2, dim=-1)
        return t * self.freqs_cos + torch.cat((-second, first), dim=-1) * self.freqs_sin


class DiT(nn.Module):
    def __init__(self, block: type[nn.Module] = DiTBlock) -> None:
        super().__init__()
        self.patch_size, self.out_channels = 2, 4
        self.x_embedder, self.t_embedder, self.y_embedder = PatchEmbed(), TimestepEmbedder(), nn.Embedding(11, WIDTH)
        self.pos_embed = nn.Parameter(torch.randn(1, SIZE * SIZE, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.final_layer = nn.Linear(WIDTH, 16)

    def embed(self, x: Tensor, t: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.x_embedder(x) + self.pos_embed, self.t_embedder(t) + self.y_embedder(y)

    def unpatchify(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.final_layer(x).transpose(1, 2).unflatten(2, (SIZE, SIZE)), 2)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x, c = self.embed(x, t, y)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(x)

    def forward_with_cfg(self, x: Tensor, t: Tensor, y: Tensor, cfg_scale: float) -> Tensor:
        half = x[: len(x) // 2]
        cond, uncond = self.forward(torch.cat((half, half)), t, y).chunk(2)
        return (uncond + cfg_scale * (cond - uncond)).repeat(2, 1, 1, 1)


class LightningDiT(DiT):
    def __init__(self) -> None:
        super().__init__(LightningDiTBlock)
        self.feat_rope = Rope(SIZE * SIZE)
        self.use_checkpoint, self.reentrant = False, True

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x, c = self.embed(x, t, y)
        for block in self.blocks:
            if self.use_checkpoint:
                x = checkpoint(block, x, c, self.feat_rope, use_reentrant=self.reentrant)
            else:
                x = block(x, c, self.feat_rope)
        return self.unpatchify(x)


class SiT(DiT):
    """With REPA's projectors, after layer `encoder_depth`, counted from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_depth = 2
        self.projectors = nn.ModuleList([nn.Linear(WIDTH, 5)])

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, c = self.embed(x, t, y)
        batch, tokens, width = x.shape
        projected = []
        for i, block in enumerate(self.blocks):
            x = block(x, c)
            if i + 1 == self.encoder_depth:
                flat = x.reshape(-1, width)
                projected = [projector(flat).reshape(batch, tokens, -1) for projector in self.projectors]
        return self.unpatchify(x), projected


def inputs(batch: int) -> dict[str, Any]:
    return {
        "x": random(1, batch, 4, 2 * SIZE, 2 * SIZE),
        "t": torch.tensor([200.0, 800.0])[:batch],
        "y": torch.tensor([3, 10])[:batch],
    }


BLOCKS = (Blocks(name="blocks", keyword="x"),)
CASES = [
    Case(name="outside-dit", build=DiT, inputs=inputs, blocks=BLOCKS, tokens=36),
    Case(name="outside-lightningdit", build=LightningDiT, inputs=inputs, blocks=BLOCKS, tokens=36),
    Case(name="outside-sit-repa", build=SiT, inputs=inputs, blocks=BLOCKS, tokens=36),
]
