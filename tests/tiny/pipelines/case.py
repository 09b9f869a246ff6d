"""A tiny pipeline, with what the contract of finetune/families/test_contract.py needs to know of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor


def to_image(pixels: Tensor) -> Image.Image:
    """The first frame of pixels (1, 3, F, H, W) in [-1, 1]."""
    return Image.fromarray((pixels[0, :, 0].permute(1, 2, 0) * 127.5 + 127.5).round().byte().numpy())


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
    references: int = 1
    """How many source images an edit has; the second is the first one mirrored."""
    appended: bool = True
    """Source images are tokens after the target's, not channels."""
    condition: float | None = None
    """Tokens after the target's, as a share of them, where they are not those of the source images."""
    truncates: bool = True
    """The stock pipeline cuts a prompt that is too long; else it fails."""
    one_prompt: bool = False
    """The stock pipeline takes one prompt at a time."""
    positions: str | None = None
    """The transformer's argument with a row for each token, text first; rows of text are 0."""
    text: tuple[str, ...] | None = None
    """The transformer's text argument and its mask, where padding differs; one after the other if there are several."""
    channels_last: bool = False
    """The pipeline draws its noise with the channels last."""
    one_length: bool = False
    """Texts of a batch have one length."""
    one_sample: bool = False
    """A batch is one sample."""
    decodes: bool = True
    """The stock pipeline decodes the latents that its loop ends with as they are."""
    negative: str = "two dogs"
    """What guidance leads away from."""
    one_time: bool = False
    """The pipeline gives every token a time though all are the same; the family gives each sample one."""
    whole_steps: bool = False
    """Timesteps are rounded to whole numbers, and the pipeline tells the model the scheduler's sigmas instead."""
    prepare: Callable[[Any], None] = lambda pipeline: None
    """Changes a loaded pipeline so that it draws the size it is told."""
    reads_values: str = ""
    """Why shapes within the stock model depend on values, which no step can avoid to wait for."""
    waits: tuple[str, ...] = ()
    """Lines of the stock model that wait for the device in every forward, in part."""
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
    unread: tuple[str, ...] = ()
    """Arguments of the transformer that its prediction does not depend on, or that it computes from others itself."""
    begins: Callable[[Tensor, dict[str, Tensor]], Tensor] = lambda noise, batch: noise
    """The state that the pipeline's loop begins with, from its noise and a batch."""
    pinned: bool = False
    """`attach` keeps the first frame's tokens, without being told."""
    pack: Callable[[Any, Tensor], Tensor] = lambda pipeline, latents: latents
    """Latents as the pipeline returns them."""
    stepped: Callable[[Any, Tensor], Tensor] | None = None
    """Latents as the pipeline's loop steps them, where that is not as it returns them."""

    @property
    def beside(self) -> float:
        """Tokens that are kept after the target's, as a share of them."""
        if self.condition is not None:
            return self.condition
        return self.references if self.reference and self.appended else 0

    def images(self, pixels: Tensor) -> list[Tensor]:
        """The source images of an edit, from pixels (1, 3, F, H, W)."""
        return [pixels, pixels.flip(-1)][: self.references] if self.reference else []

    def noise(self, shape: torch.Size) -> Tensor:
        """The initial noise of the pipeline with generator 0."""
        generator = torch.Generator().manual_seed(0)
        if self.drawn_before is not None:
            for _ in range(shape[0] if self.image_per_prompt else 1):
                torch.randn(self.drawn_before(shape), generator=generator)
        batch, channels, *sizes = shape
        if self.channels_last:
            return torch.randn(batch, *sizes, channels, generator=generator).movedim(-1, 1)
        if not self.frames_first:
            return torch.randn(shape, generator=generator)
        frames, *rest = sizes
        return torch.randn(batch, frames, channels, *rest, generator=generator).transpose(1, 2)

    def __call__(self, folder: Path) -> None:
        """Write the pipeline."""
        self.build().save_pretrained(folder)


def first_frame(pixels: Tensor) -> dict[str, Any]:
    """The first frame of pixels (1, 3, F, H, W) as the argument of an image-to-video pipeline."""
    frame = (pixels[0, :, 0].permute(1, 2, 0) * 127.5 + 127.5).round().byte().numpy()
    return {"image": Image.fromarray(frame)}
