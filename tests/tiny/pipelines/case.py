"""A tiny pipeline, with what the contract of finetune/test_families.py needs to know of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """The module of the transformer that makes tokens of latents: (B, S, D), or (B, D, F, H, W), comes out."""
    frames: int = 1
    """Pixel frames of a sample."""
    size: tuple[int, int] = (64, 96)
    """Pixel rows and columns of a sample."""
    arguments: Callable[[Tensor], dict[str, Any]] = lambda pixels: {}
    """More arguments for a call of the pipeline, from pixels (1, 3, F, H, W) in [-1, 1]."""
    reference: bool = False
    """The pixels are the source image of an edit, `reference.mean` in a batch."""
    text: tuple[str, str] | None = None
    """The transformer's text argument and its mask, where texts are padded to no fixed length."""
    positions: str | None = None
    """The transformer's argument with a row for each token, text first; rows of text are 0."""
    negative: str = "two dogs"
    """What guidance leads away from."""
    one_time: bool = False
    """The pipeline gives every token a time though all are the same; the family gives each sample one."""
    prepare: Callable[[Any], None] = lambda pipeline: None
    """Changes a loaded pipeline so that it draws the size it is told."""
    reads_values: str = ""
    """Why shapes within the stock model depend on values, which no step can avoid to wait for."""
    waits: tuple[str, ...] = ()
    """Lines of the stock model that wait for the device in every forward, in part."""
    pack: Callable[[Any, Tensor], Tensor] = lambda pipeline, latents: latents
    """Latents as the pipeline's loop holds them."""
    unpack: Callable[[Any, Tensor], Tensor] | None = None
    """Latents as the pipeline returns them, where that is not as its loop holds them."""

    def __call__(self, folder: Path) -> None:
        """Write the pipeline."""
        self.build().save_pretrained(folder)
