"""EfficientNet-Lite0: an ImageNet classifier small enough for a CPU, with 1280 features for a Frechet distance.

- MobileNet blocks without squeeze-and-excite, ReLU6 everywhere, as the Lite variants have them.
- TensorFlow's "same" padding: if a stride of 2 needs an odd amount, the extra row and column go to bottom and right.
- Module names are those of the published state dict, so that it loads directly.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Tan and Le 2019 (arXiv 1905.11946) Table 1 at width and depth 1: layers, kernel, stride, expansion, channels
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
WIDTH = 1280
CLASSES = 1000

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class SameConv(nn.Conv2d):
    """A convolution without bias, padded so that a stride s turns H into ceil(H / s)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        pads: list[int] = []
        for size in (input.shape[-1], input.shape[-2]):  # F.pad counts axes from the last
            needed = max((-(-size // self.stride[0]) - 1) * self.stride[0] + self.kernel_size[0] - size, 0)
            pads += [needed // 2, needed - needed // 2]
        return super().forward(F.pad(input, pads))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class MBConv(nn.Module):
    """An inverted-residual block: expand, depthwise convolution, project; the input is added if the shapes agree."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expands = expansion != 1
        self.adds = stride == 1 and inputs == outputs
        if self.expands:
            self._expand_conv = SameConv(inputs, inner, 1)
            self._bn0 = _norm(inner)
        self._depthwise_conv = SameConv(inner, inner, kernel, stride, groups=inner)
        self._bn1 = _norm(inner)
        self._project_conv = SameConv(inner, outputs, 1)
        self._bn2 = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        h = F.relu6(self._bn1(self._depthwise_conv(h)))  # (B, inner, H/s, W/s)
        h = self._bn2(self._project_conv(h))  # (B, outputs, H/s, W/s)
        return x + h if self.adds else h


class EfficientNetLite0(nn.Module):
    """(B, 3, 224, 224), normalised by MEAN and STD -> features (B, 1280)."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = SameConv(3, 32, 3, stride=2)
        self._bn0 = _norm(32)
        blocks, inputs = [], 32
        for layers, kernel, stride, expansion, outputs in STAGES:
            for layer in range(layers):
                blocks.append(MBConv(inputs, outputs, kernel, stride if layer == 0 else 1, expansion))
                inputs = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = SameConv(inputs, WIDTH, 1)
        self._bn1 = _norm(WIDTH)
        self._fc = nn.Linear(WIDTH, CLASSES)  # unused; part of the published state dict

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)))  # (B, 32, H/2, W/2)
        x = F.relu6(self._bn1(self._conv_head(self._blocks(x))))  # (B, 1280, H/32, W/32)
        return x.mean((2, 3))  # (B, 1280)


def imagenet_pixels(images: Tensor, *, shorter: int, crop: int) -> Tensor:
    """uint8 (B, 3, H, W) -> the centre of the image resized to `shorter`, normalised, (B, 3, crop, crop)."""
    height, width = images.shape[-2:]
    scale = shorter / min(height, width)
    size = (max(crop, round(height * scale)), max(crop, round(width * scale)))
    x = images.float() / 255
    if size != (height, width):
        x = F.interpolate(x, size, mode="bicubic", antialias=True).clamp(0, 1)  # (B, 3, shorter, ...)
    top, left = (size[0] - crop) // 2, (size[1] - crop) // 2
    x = x[..., top : top + crop, left : left + crop]  # (B, 3, crop, crop)
    mean, std = (torch.tensor(values, device=x.device).view(3, 1, 1) for values in (MEAN, STD))
    return (x - mean) / std
