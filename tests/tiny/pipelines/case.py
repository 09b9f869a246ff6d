"""A tiny pipeline, with what the contract of finetune/test_families.py needs to know of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """The module of the transformer that makes tokens of latents: (B, S, D), or (B, D, F, H, W), comes out."""
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
    truncates: bool = True
    """The stock pipeline cuts a prompt that is too long; else it fails."""
    one_prompt: bool = False
    """The stock pipeline takes one prompt at a time."""
    channels_last: bool = False
    """The pipeline draws its noise with the channels last."""
    one_length: bool = False
    """Texts of a batch have one length."""
    decodes: bool = True
    """The stock pipeline decodes the latents that its loop ends with as they are."""
    text: tuple[str, str] | None = None
    """The transformer's text argument and its mask, where texts are padded to no fixed length."""
    negative: str = "two dogs"
    """What guidance leads away from."""
    one_time: bool = False
    """The pipeline gives every token a time though all are the same; the family gives each sample one."""
    waits: tuple[str, ...] = ()
    """Lines of the stock model that wait for the device in every forward, in part."""
    pack: Callable[[Any, Tensor], Tensor] = lambda pipeline, latents: latents
    """Latents as the pipeline's loop holds them."""

    def images(self, pixels: Tensor) -> list[Tensor]:
        """The source images of an edit, from pixels (1, 3, F, H, W)."""
        return [pixels, pixels.flip(-1)][: self.references] if self.reference else []

    def __call__(self, folder: Path) -> None:
        """Write the pipeline."""
        self.build().save_pretrained(folder)
