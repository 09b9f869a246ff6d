"""The layers of a diffusion transformer.

- Layers know neither routing nor grids nor the sequence length: positions reach a block as a per-token table,
  whose rows are gathered together with the tokens.
- The paper's layers (Peebles and Xie, arXiv 2212.09748) are the default; rotary positions, QK-norm, RMSNorm
  and SwiGLU are options of the same modules.
- SiLU is applied to the condition `c` once, by the caller, as it is the same for every block.
- Tables are computed in float64 and rounded once; angles are never computed below float32.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tread.kernels.adaln import EPS, AdaNorm, NormName

MlpName = Literal["gelu", "swiglu"]


def patchify(x: Tensor, patch: int) -> Tensor:
    """Images (B, C, H, W) -> tokens (B, S, patch * patch * C), rows of the grid one after the other."""
    x = x.unflatten(2, (-1, patch)).unflatten(4, (-1, patch))  # (B, C, h, p, w, p)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, h * w, p * p * C)


def unpatchify(x: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """Tokens (B, S, patch * patch * C) on a grid (h, w) -> images (B, C, h * patch, w * patch)."""
    x = x.unflatten(1, grid).unflatten(3, (patch, patch, -1))  # (B, h, w, p, p, C)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)  # (B, C, H, W)


def _coordinates(grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The row and the column of every token, each (S,), in float64."""
    rows, columns = (torch.arange(size, dtype=torch.float64) for size in grid)
    return rows.repeat_interleave(grid[1]), columns.repeat(grid[0])  # (S,), (S,)


def _angles(position: Tensor, count: int, period: float) -> Tensor:
    """Positions (N,) times `count` frequencies falling from 1 towards 1 / period -> (N, count)."""
    steps = torch.arange(count, dtype=position.dtype, device=position.device) / count  # (count,)
    return position[:, None] * torch.exp(-math.log(period) * steps)  # (N, count)


# Vaswani et al. 2017, section 3.5, once for each axis
def sincos_positions(grid: tuple[int, int], width: int) -> Tensor:
    """The fixed position embedding of a grid (h, w) -> (S, width).

    The first half of the channels encodes the column and the second the row, each as sines then cosines: the
    order of the published weights.
    """
    rows, columns = (_angles(axis, width // 4, 10_000.0) for axis in _coordinates(grid))  # (S, width / 4)
    table = torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=1)  # (S, width)
    return table.to(torch.get_default_dtype())


# Su et al. 2021 (arXiv 2104.09864), Eq. 34, half of the channel pairs turning with each axis
def rope_positions(grid: tuple[int, int], head_size: int) -> Tensor:
    """Cosine and sine of the rotation of each token's queries and keys -> (S, head_size / 2, 2).

    The period is 100, where text models use 10000: a grid has tens of tokens per side, over which slower angles
    would hardly change.
    """
    rows, columns = (_angles(axis, head_size // 4, 100.0) for axis in _coordinates(grid))
    angles = torch.cat([rows, columns], dim=1)  # (S, head_size / 2)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).to(torch.get_default_dtype())


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate x (B, heads, S, head_size) by a table (S, head_size / 2, 2) or, per sample, (B, S, ...)."""
    cos, sin = rope.unsqueeze(-4).unbind(-1)  # (1, S, head_size / 2) or (B, 1, S, head_size / 2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class TimeEmbedding(nn.Module):
    """Time (B,) -> (B, width): sinusoids of 128 frequencies through a two-layer MLP."""

    frequencies = 128

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2 * self.frequencies, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, time: Tensor) -> Tensor:
        time = time.to(torch.promote_types(time.dtype, torch.float32))  # bf16 rounds 999 to 1000
        angles = _angles(time, self.frequencies, 10_000.0)  # (B, 128)
        waves = torch.cat([angles.cos(), angles.sin()], dim=1)  # (B, 256)
        return self.fc2(F.silu(self.fc1(waves.to(self.fc1.weight.dtype))))  # (B, D)


class HeadNorm(nn.Module):
    """RMSNorm of each head's queries or keys, with one learned weight per channel."""

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_size))

    def forward(self, x: Tensor) -> Tensor:
        # The weight is not passed to rms_norm: under autocast its dtype differs from x's, which disables the fused
        # kernel.
        return (F.rms_norm(x, x.shape[-1:], eps=EPS) * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Self-attention over tokens x (B, S, D) -> (B, S, D), with optional QK-norm and rotary positions."""

    def __init__(self, width: int, heads: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.q_norm = HeadNorm(width // heads) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(width // heads) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: Tensor | None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, S, 3, heads, head_size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, S, head_size) each
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        x = F.scaled_dot_product_attention(q, k, v)  # (B, heads, S, head_size)
        return self.proj(x.transpose(1, 2).flatten(2))  # (B, S, D)


class GeluMlp(nn.Module):
    """The MLP of the paper, with the tanh approximation of GELU."""

    def __init__(self, width: int, mlp_ratio: float) -> None:
        super().__init__()
        hidden = int(width * mlp_ratio)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))  # (B, S, D)


# Shazeer 2020 (arXiv 2002.05202), Eq. 6
class SwigluMlp(nn.Module):
    """A gated MLP without biases, of about the parameters of `GeluMlp`."""

    def __init__(self, width: int, mlp_ratio: float) -> None:
        super().__init__()
        # Three matrices instead of two: 2/3 of the hidden size keeps the parameter count, and a multiple of
        # 8 keeps the matrix products on the fast kernels.
        hidden = max(8, 8 * round(width * mlp_ratio / 12))
        self.fc1 = nn.Linear(width, 2 * hidden, bias=False)
        self.fc2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)  # (B, S, hidden) each
        return self.fc2(F.silu(gate) * value)  # (B, S, D)


class Block(nn.Module):
    """One layer with adaLN-Zero: tokens x (B, S, D), condition c (B, D), rope table -> (B, S, D)."""

    def __init__(
        self, width: int, heads: int, *, mlp_ratio: float, qk_norm: bool, norm: NormName, mlp: MlpName
    ) -> None:
        super().__init__()
        self.norm1 = AdaNorm(norm)
        self.attn = Attention(width, heads, qk_norm=qk_norm)
        self.norm2 = AdaNorm(norm)
        self.mlp = {"gelu": GeluMlp, "swiglu": SwigluMlp}[mlp](width, mlp_ratio)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, c: Tensor, rope: Tensor | None = None) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).unsqueeze(1).chunk(6, dim=-1)  # (B, 1, D)
        x, normed = self.norm1(x, shift1, scale1)
        x, normed = self.norm2.after(x, self.attn(normed, rope), gate1, shift2, scale2)
        return x + gate2 * self.mlp(normed)


class FinalLayer(nn.Module):
    """Tokens x (B, S, D), condition c (B, D) -> patches (B, S, out_size)."""

    def __init__(self, width: int, out_size: int, *, norm: NormName) -> None:
        super().__init__()
        self.norm = AdaNorm(norm)
        self.modulation = nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, out_size)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.modulation(c).unsqueeze(1).chunk(2, dim=-1)  # (B, 1, D) each
        return self.linear(self.norm(x, shift, scale)[1])  # (B, S, out_size)
