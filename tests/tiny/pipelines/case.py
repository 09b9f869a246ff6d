"""A tiny pipeline, with what the contract of finetune/test_families.py needs to know of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One tiny pipeline; called with a folder, it writes itself there."""

    name: str
    family: str
    """`model_family`."""
    build: Callable[[], Any]
    """Makes the stock pipeline."""
    embedder: str
    """A module of the transformer that each token passes alone: (B, S, D), or (B, D, F, H, W), comes out."""
    frames: int = 1
    """Pixel frames of a sample."""
    size: tuple[int, int] = (64, 96)
    """Pixel rows and columns of a sample."""
    arguments: Callable[[Tensor], dict[str, Any]] = lambda pixels: {}
    """More arguments for a call of the pipeline, from pixels (1, 3, F, H, W) in [-1, 1]."""
    reference: bool = False
    """The pixels are the source image of an edit, `reference.mean` in a batch."""
    text: tuple[str, ...] | None = None
    """The transformer's text argument and its mask, where padding differs; one after the other if there are several."""
    negative: str = "two dogs"
    """What guidance leads away from."""
    one_time: bool = False
    """The pipeline gives every token a time though all are the same; the family gives each sample one."""
    waits: tuple[str, ...] = ()
    """Lines of the stock model that wait for the device in every forward, in part."""
    reads_values: bool = False
    """The stock model's forward depends on values of its masks."""
    edm: bool = False
    """The pipeline steps x + sigma noise, and the model sees it scaled to a flow's state at sigma / (sigma + 1)."""
    frames_first: bool = False
    """The pipeline's latents are (B, f, C, h, w)."""
    text_before: int = 0
    """Tokens of text that come out of the embedder before those of latents."""
    image_per_prompt: bool = False
    """The pipeline takes as many images as prompts."""
    drawn_before: Callable[[torch.Size], tuple[int, ...]] | None = None
    """What the pipeline draws before the initial noise, by the shape of the latents: an image's posterior, say."""
    pack: Callable[[Any, Tensor], Tensor] = lambda pipeline, latents: latents
    """Latents as the pipeline returns them."""
    stepped: Callable[[Any, Tensor], Tensor] | None = None
    """Latents as the pipeline's loop steps them, where that is not as it returns them."""

    def noise(self, shape: torch.Size) -> Tensor:
        """The initial noise of the pipeline with generator 0."""
        generator = torch.Generator().manual_seed(0)
        if self.drawn_before is not None:
            for _ in range(shape[0] if self.image_per_prompt else 1):
                torch.randn(self.drawn_before(shape), generator=generator)
        if not self.frames_first:
            return torch.randn(shape, generator=generator)
        batch, channels, frames, *rest = shape
        return torch.randn(batch, frames, channels, *rest, generator=generator).transpose(1, 2)

    def __call__(self, folder: Path) -> None:
        """Write the pipeline."""
        self.build().save_pretrained(folder)


def first_frame(pixels: Tensor) -> dict[str, Any]:
    """The first frame of pixels (1, 3, F, H, W) as the argument of an image-to-video pipeline."""
    frame = (pixels[0, :, 0].permute(1, 2, 0) * 127.5 + 127.5).round().byte().numpy()
    return {"image": Image.fromarray(frame)}
