"""A model of your own joins with one declaration: `FAMILY` below. The model knows nothing of routing.

    python examples/own_model.py

It trains a small transformer on pictures of discs, first dense and then routed, for a few steps each.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tread

SHAPE, PATCH, WIDTH, HEADS, DEPTH = (1, 16, 16), 2, 64, 4, 6
GRID = SHAPE[-1] // PATCH
TOKENS = GRID * GRID


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Tokens (B, L, D); angles (B or 1, L, D / heads / 2) turn queries and keys by their places."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, H, L, d) each
        turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)  # (B or 1, 1, L, d / 2)
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(-2) for t in (q, k))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class PixelTransformer(nn.Module):
    """Patches of an image, and before them one token that says the time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, PATCH * PATCH)
        place = torch.stack(torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij"), -1).view(TOKENS, 2)
        speeds = 2.0 ** -torch.arange(WIDTH // HEADS // 4)
        angles = (place.unsqueeze(-1) * speeds).flatten(1)  # (S, d / 2)
        self.register_buffer("angles", F.pad(angles, (0, 0, 1, 0)).unsqueeze(0))  # (1, 1 + S, d / 2)

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        waves = time.unsqueeze(1) * 2.0 ** torch.arange(WIDTH // 2)  # (B, D / 2)
        first = self.time(torch.cat([waves.sin(), waves.cos()], dim=1)).unsqueeze(1)  # (B, 1, D)
        x = torch.cat([first, self.embed(F.pixel_unshuffle(images, PATCH).flatten(2).transpose(1, 2))], dim=1)
        for block in self.blocks:
            x = block(x, self.angles)
        x = self.head(x[:, 1:]).transpose(1, 2).unflatten(2, (GRID, GRID))  # (B, patch, GRID, GRID)
        return F.pixel_shuffle(x, PATCH)


FAMILY = tread.Family(
    models=("PixelTransformer",),
    stacks=(
        tread.Stack(
            name="blocks",  # the layers
            stream="x",  # the argument that carries the tokens
            sides=(tread.Side(name="angles", dim=1),),  # an argument whose rows belong to the tokens
        ),
    ),
    tokens=lambda model, arguments: TOKENS,  # the image's; the token of the time, before them, is always kept
)


def discs(batch: int, generator: torch.Generator) -> Tensor:
    """Bright discs of random place and size (B, 1, H, W)."""
    x, y, size = torch.rand(3, batch, 1, 1, 1, generator=generator)
    line = torch.linspace(0, 1, SHAPE[-1])
    distance = ((line - x) ** 2 + (line.unsqueeze(1) - y) ** 2).sqrt()
    return 2 * torch.sigmoid(40 * (0.15 + 0.2 * size - distance)) - 1


def train(model: nn.Module, steps: int) -> float:
    """A few steps of flow matching; the mean loss of the second half."""
    generator, losses = torch.Generator().manual_seed(0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        images, time = discs(32, generator), torch.rand(32, generator=generator)
        noise, mix = torch.randn(images.shape, generator=generator), time.view(-1, 1, 1, 1)
        loss = F.mse_loss(model((1 - mix) * images + mix * noise, time), noise - images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return math.fsum(losses[steps // 2 :]) / (steps - steps // 2)


def main(steps: int = 60) -> None:
    torch.manual_seed(0)
    print(f"dense: loss {train(PixelTransformer(), steps):.3f}")
    torch.manual_seed(0)
    model = PixelTransformer()
    routes = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -3}]}
    with tread.attach(model, routes, family=FAMILY) as handle:
        print(f"routed: loss {train(model, steps):.3f}, {handle.kept_share:.0%} of the tokens in layers 2..3")


if __name__ == "__main__":
    main()
