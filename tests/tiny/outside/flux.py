"""The layout of Black Forest Labs' `Flux`, a trainer's subclass of it, and Chroma.

Only names, signatures and the order of tokens are those of the originals: layers here are one attention each.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.tiny.case import Blocks, Case, random

WIDTH, HEADS, TEXT = 32, 2, 5
AXES = (4, 6, 6)


def rotate(x: Tensor, pe: Tensor) -> Tensor:
    """Pairs of x (B, H, L, D) times 2 x 2 matrices (B, 1, L, D / 2, 2, 2)."""
    return (pe * x.unflatten(-1, (-1, 1, 2))).sum(-1).flatten(-2).to(x.dtype)


class Embedder(nn.Module):
    """Ids (B, L, 3) -> matrices (B, 1, L, D / 2, 2, 2)."""

    def forward(self, ids: Tensor) -> Tensor:
        angles = [ids[..., i, None] * 0.3 ** torch.arange(size // 2) for i, size in enumerate(AXES)]
        angle = torch.cat(angles, dim=-1)
        rows = (angle.cos(), -angle.sin(), angle.sin(), angle.cos())
        return torch.stack(rows, dim=-1).unflatten(-1, (2, 2)).unsqueeze(1)


class Part(nn.Module):
    """What one stream brings to an attention and takes from it."""

    def __init__(self) -> None:
        super().__init__()
        self.mod, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor, vec: Tensor) -> Tensor:
        scale = self.mod(vec).unsqueeze(1).chunk(2, dim=-1)[0]
        return self.qkv(self.norm(x) * (1 + scale)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def add(self, x: Tensor, attended: Tensor, vec: Tensor) -> Tensor:
        gate = self.mod(vec).unsqueeze(1).chunk(2, dim=-1)[1]
        return x + (1 + gate) * F.gelu(self.out(attended))


def attend(qkv: Tensor, pe: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = qkv
    return F.scaled_dot_product_attention(rotate(q, pe), rotate(k, pe), v, mask).transpose(1, 2).flatten(2)


def text_mask(given: Tensor | None, length: int) -> Tensor | None:
    """A mask over text (B, T), lengthened by tokens that are all seen."""
    return None if given is None else F.pad(given, (0, length - given.shape[1]), value=True)[:, None, None]


class DoubleStreamBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.img, self.txt = Part(), Part()

    def run(self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        qkv = torch.cat((self.txt.heads(txt, vec), self.img.heads(img, vec)), dim=3)
        out = attend(qkv, pe, mask)
        words = txt.shape[1]
        return self.img.add(img, out[:, words:], vec), self.txt.add(txt, out[:, :words], vec)

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(img, txt, vec, pe, None)


class SingleStreamBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def run(self, x: Tensor, vec: Tensor, pe: Tensor, mask: Tensor | None) -> Tensor:
        return self.part.add(x, attend(self.part.heads(x, vec), pe, mask), vec)

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor) -> Tensor:
        return self.run(x, vec, pe, None)


class TrainersDoubleBlock(DoubleStreamBlock):
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor, txt_attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.run(img, txt, vec, pe, text_mask(txt_attention_mask, img.shape[1] + txt.shape[1]))


class TrainersSingleBlock(SingleStreamBlock):
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, vec: Tensor, pe: Tensor, txt_attention_mask: Tensor | None = None
    ) -> Tensor:
        return self.run(x, vec, pe, text_mask(txt_attention_mask, x.shape[1]))


class ChromaDoubleBlock(DoubleStreamBlock):
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, img: Tensor, txt: Tensor, pe: Tensor, distill_vec: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.run(img, txt, distill_vec, pe, mask)


class ChromaSingleBlock(SingleStreamBlock):
    def forward(self, x: Tensor, pe: Tensor, distill_vec: Tensor, mask: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.run(x, distill_vec, pe, mask)


class Base(nn.Module):
    """What all of them have."""

    def __init__(self, double: type[nn.Module], single: type[nn.Module]) -> None:
        super().__init__()
        self.img_in, self.txt_in = nn.Linear(8, WIDTH), nn.Linear(16, WIDTH)
        self.pe_embedder = Embedder()
        self.double_blocks = nn.ModuleList(double() for _ in range(2))
        self.single_blocks = nn.ModuleList(single() for _ in range(3))
        self.final_layer = nn.Linear(WIDTH, 8)

    def table(self, img_ids: Tensor, txt_ids: Tensor) -> Tensor:
        return self.pe_embedder(torch.cat((txt_ids, img_ids), dim=1))


class Flux(Base):
    def __init__(
        self, double: type[nn.Module] = DoubleStreamBlock, single: type[nn.Module] = SingleStreamBlock
    ) -> None:
        super().__init__(double, single)
        self.time_in, self.vector_in = nn.Linear(1, WIDTH), nn.Linear(16, WIDTH)

    def condition(self, timesteps: Tensor, y: Tensor, guidance: Tensor | None) -> Tensor:
        return self.time_in(timesteps[:, None]) + self.vector_in(y) + (0 if guidance is None else guidance[:, None])

    def forward(
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        y: Tensor,
        guidance: Tensor | None = None,
    ) -> Tensor:
        img, txt, vec = self.img_in(img), self.txt_in(txt), self.condition(timesteps, y, guidance)
        pe = self.table(img_ids, txt_ids)
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe)
        img = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            img = block(img, vec=vec, pe=pe)
        return self.final_layer(img[:, txt.shape[1] :])


class TrainersFlux(Flux):
    """A trainer's subclass: a mask over the text, ControlNet's residuals, layers called by position."""

    def __init__(self) -> None:
        super().__init__(TrainersDoubleBlock, TrainersSingleBlock)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        y: Tensor,
        block_controlnet_hidden_states: list[Tensor] | None = None,
        guidance: Tensor | None = None,
        txt_attention_mask: Tensor | None = None,
    ) -> Tensor:
        img, txt, vec = self.img_in(img), self.txt_in(txt), self.condition(timesteps, y, guidance)
        pe = self.table(img_ids, txt_ids)
        for index, block in enumerate(self.double_blocks):
            img, txt = block(img, txt, vec, pe, txt_attention_mask)
            if block_controlnet_hidden_states is not None:
                img = img + block_controlnet_hidden_states[index % len(block_controlnet_hidden_states)]
        img = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            img = block(img, vec, pe, txt_attention_mask)
        return self.final_layer(img[:, txt.shape[1] :])


class Chroma(Base):
    """Modulations come from one layer for the whole model, and the mask covers every pair of tokens."""

    def __init__(self) -> None:
        super().__init__(ChromaDoubleBlock, ChromaSingleBlock)
        self.distilled_guidance_layer = nn.Linear(2, 5 * WIDTH)

    def forward(
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        txt_mask: Tensor,
        timesteps: Tensor,
        guidance: Tensor,
    ) -> Tensor:
        vectors = self.distilled_guidance_layer(torch.stack((timesteps, guidance), dim=1)).chunk(5, dim=1)
        seen = F.pad(txt_mask, (0, img.shape[1]), value=True)  # (B, L)
        mask = (seen[:, None, :] | ~seen[:, :, None])[:, None]  # (B, 1, L, L)
        pe, img, txt = self.table(img_ids, txt_ids), self.img_in(img), self.txt_in(txt)
        for block, vec in zip(self.double_blocks, vectors[:2], strict=True):
            img, txt = block(img=img, txt=txt, pe=pe, distill_vec=vec, mask=mask)
        img = torch.cat((txt, img), 1)
        for block, vec in zip(self.single_blocks, vectors[2:], strict=True):
            img = block(img, pe=pe, distill_vec=vec, mask=mask)
        return self.final_layer(img[:, txt.shape[1] :])


def grid(batch: int, rows: int, columns: int, image: int = 0) -> Tensor:
    """Image ids (B, S, 3): which image, row, column."""
    axes = (torch.tensor([float(image)]), torch.arange(float(rows)), torch.arange(float(columns)))
    return torch.cartesian_prod(*axes).expand(batch, -1, -1)


def inputs(batch: int) -> dict[str, Any]:
    return {
        "img": random(1, batch, 12, 8),
        "img_ids": grid(batch, 3, 4),
        "txt": random(2, batch, TEXT, 16),
        "txt_ids": torch.zeros(batch, TEXT, 3),
        "timesteps": torch.tensor([0.2, 0.8])[:batch],
        "y": random(3, batch, 16),
        "guidance": torch.full((batch,), 0.5),
    }


def kontext(batch: int) -> dict[str, Any]:
    ids = torch.cat((grid(batch, 3, 4), grid(batch, 2, 3, image=1)), dim=1)
    return inputs(batch) | {"img": random(4, batch, 18, 8), "img_ids": ids}


def words(batch: int) -> Tensor:
    return torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)[:batch]


def masked(batch: int) -> dict[str, Any]:
    return inputs(batch) | {"txt_attention_mask": words(batch)}


def controlled(batch: int) -> dict[str, Any]:
    return inputs(batch) | {"block_controlnet_hidden_states": [random(5, batch, 12, WIDTH)]}


def chroma(batch: int) -> dict[str, Any]:
    given = inputs(batch)
    del given["y"]
    return given | {"txt_mask": words(batch)}


BLOCKS = (Blocks(name="double_blocks", keyword="img", returns=0), Blocks(name="single_blocks", keyword="x"))
CASES = [
    Case(name="outside-flux", build=Flux, inputs=inputs, blocks=BLOCKS, tokens=12),
    Case(name="outside-flux-kontext", build=Flux, inputs=kontext, blocks=BLOCKS, tokens=18, references=6),
    Case(name="outside-flux-masked", build=TrainersFlux, inputs=masked, blocks=BLOCKS, tokens=12),
    Case(name="outside-flux-controlnet", build=TrainersFlux, inputs=controlled, blocks=BLOCKS, tokens=12),
    Case(name="outside-chroma", build=Chroma, inputs=chroma, blocks=BLOCKS, tokens=12),
]
