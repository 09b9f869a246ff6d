"""Loss masks: from an image file to one loss weight per latent.

- `mask`: the grey value is the weight, white 1 and black 0. `segmentation`: the weight is 1 unless the pixel is black.
- Transparent pixels are black. A mask is cropped like its picture, whatever its own size.
- All resampling is area averaging in floating point without a threshold: a latent has weight 0 if and only if every
  pixel under it has weight 0. Forced tokens are derived from the same weights, so no token with loss is dropped.
"""

from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from tread.data.captioned.buckets import Crop
from tread.data.captioned.tables import Media, opened
from tread.data.images import reading

MaskKind = Literal["mask", "segmentation"]


def read_mask(media: Media, crop: Crop, kind: MaskKind) -> Tensor:
    """The weights of the pixels in a bucket, float32 (H, W) in [0, 1]."""
    with reading(media):
        with Image.open(opened(media)) as image:
            weights = _weights(ImageOps.exif_transpose(image), kind)  # (h, w)
        grey = Image.fromarray(weights)
        # BOX is area averaging: every pixel of the crop counts in exactly one output pixel
        size = crop.bucket.width, crop.bucket.height
        fitted = grey.resize(size, Image.Resampling.BOX, box=crop.box(grey.size))
        fitted = fitted.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.mirrored else fitted
    return torch.from_numpy(np.array(fitted, dtype=np.float32)).clamp_(0, 1)  # (H, W)


def latent_weight(mask: Tensor, factor: int) -> Tensor:
    """The mean weight under each latent: (H, W) -> (H / factor, W / factor).

    >>> latent_weight(torch.eye(4), 2)
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """
    return F.avg_pool2d(mask.float()[None, None], factor)[0, 0]  # (h, w)


def looks_like_text(weights: Tensor) -> bool:
    """Whether a mask (H, W) is drawn in thin strokes, several beside each other, as letters are.

    A box around text does not look like it, and neither does a figure or a single line.
    """
    white = (weights > 0.5)[None, None].float()  # (1, 1, H, W)
    stroke = max(3, max(white.shape[-2:]) // 32 | 1)
    inner = 1 - F.max_pool2d(1 - white, stroke, stride=1, padding=stroke // 2)  # morphological erosion
    rows = white[0, 0][white[0, 0].any(1)]  # (rows with any, W)
    if len(rows) == 0:
        return False
    runs = (F.pad(rows, (1, 0)).diff(dim=1) > 0).sum(1).float().mean()  # white runs in a row
    return bool(inner.sum() < 0.05 * white.sum()) and float(runs) >= 3


def _weights(image: Image.Image, kind: MaskKind) -> np.ndarray:
    """Weights at the file's own size, float32 (h, w)."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip
        weights = np.asarray(image).clip(0, 65535) / 65535
    else:
        black = Image.new("RGBA", image.size, "black")
        colour = Image.alpha_composite(black, image.convert("RGBA")).convert("RGB")
        if kind == "segmentation":  # not the grey value, which is 0 for a dark blue
            return (np.asarray(colour).max(axis=-1) > 0).astype(np.float32)
        weights = np.asarray(colour.convert("L")) / 255
    if kind == "segmentation":
        weights = weights > 0
    return weights.astype(np.float32)
