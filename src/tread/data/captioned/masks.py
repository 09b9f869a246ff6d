"""Masks: where the loss counts, from an image file to a weight per latent.

- `mask`: the grey value is the weight, white 1 and black 0. `segmentation`: whatever is not black weighs 1.
- Transparent pixels are black. A mask gets the crop of its picture, whatever its own size.
- All resampling is averaging over areas, in floating point and without a threshold: a latent weighs 0 if and only if
  no pixel under it weighs anything. The tokens that routing must keep are found from the same weights, so no pixel
  that carries loss can be dropped.
"""

from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from tread.data.captioned.buckets import Crop
from tread.data.captioned.pixels import reading
from tread.data.captioned.tables import Place, opened

MaskKind = Literal["mask", "segmentation"]


def read_mask(place: Place, crop: Crop, kind: MaskKind) -> Tensor:
    """The weights of the pixels in a bucket, float32 (H, W) in [0, 1]."""
    with reading(place):
        with Image.open(opened(place)) as image:
            weights = _weights(ImageOps.exif_transpose(image), kind)  # (h, w)
        grey = Image.fromarray(weights)
        # every pixel of the file lies in exactly one box: none is lost and none spreads
        size = crop.bucket.width, crop.bucket.height
        fitted = grey.resize(size, Image.Resampling.BOX, box=crop.box(grey.size))
    return torch.from_numpy(np.array(fitted, dtype=np.float32)).clamp_(0, 1)  # (H, W)


def latent_weight(mask: Tensor, factor: int) -> Tensor:
    """The mean weight under each latent: (H, W) -> (H / factor, W / factor).

    >>> latent_weight(torch.eye(4), 2)
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """
    return F.avg_pool2d(mask.float()[None, None], factor)[0, 0]  # (h, w)


def _weights(image: Image.Image, kind: MaskKind) -> np.ndarray:
    """Float32 (h, w) at the file's own size."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip
        weights = np.asarray(image).clip(0, 65535) / 65535
    else:
        black = Image.new("RGBA", image.size, "black")
        colour = Image.alpha_composite(black, image.convert("RGBA")).convert("RGB")
        if kind == "segmentation":  # a dark blue has a grey value of 0
            return (np.asarray(colour).max(axis=-1) > 0).astype(np.float32)
        weights = np.asarray(colour.convert("L")) / 255
    if kind == "segmentation":
        weights = weights > 0
    return weights.astype(np.float32)
