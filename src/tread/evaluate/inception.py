"""Inception-v3 of FID, and its preprocessing.

- It is the TensorFlow graph of 2015-12-05, which differs from the usual network: average pooling excludes padding,
  the last mixed layer uses max pooling, and there are 1,008 classes.
- Module names are those of the `pt_inception-2015-12-05` state dict, so that it loads directly.
- The resize is the graph's own: bilinear without antialias, output pixel i samples input i * (in / out). Current
  resizes sample at pixel centres, which gives another input.
- Class probabilities omit the bias, as the Inception Score's first implementation and ADM's evaluator do.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread.evaluate.activations import Activations

SIZE = 299
WIDTH = 2048
CLASSES = 1008
SPATIAL_CHANNELS = 7  # sFID: the first 7 channels of 17 x 17 pixels, 2,023 features


def inception_pixels(images: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) -> float32 (B, 3, 299, 299) in [-1, 1): (x - 128) / 128 of the resized values."""
    x = _resize(_resize(images.float(), -2), -1)  # (B, 3, 299, 299)
    return (x - 128) / 128


def _resize(x: Tensor, axis: int) -> Tensor:
    """Resize one axis to 299 as TensorFlow 1's resize_bilinear does, without align_corners or half-pixel centres."""
    size = x.shape[axis]
    if size == SIZE:
        return x
    position = torch.arange(SIZE, device=x.device, dtype=torch.float32) * (size / SIZE)  # (299,)
    low = position.floor().long().clamp(max=size - 1)
    high = (low + 1).clamp(max=size - 1)
    weight = (position - low).view(-1, 1) if axis == -2 else position - low
    below, above = x.index_select(axis, low), x.index_select(axis, high)
    return below + (above - below) * weight


class Conv(nn.Module):
    """Convolution without bias, batch normalisation, ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int] = 1, *, stride: int = 1, same: bool = True
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if same else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


# Szegedy et al. 2015 (arXiv 1512.00567) Figure 5
class MixedA(nn.Module):
    def __init__(self, inputs: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(inputs, 64)
        self.branch5x5_1 = Conv(inputs, 48)
        self.branch5x5_2 = Conv(48, 64, 5)
        self.branch3x3dbl_1 = Conv(inputs, 64)
        self.branch3x3dbl_2 = Conv(64, 96, 3)
        self.branch3x3dbl_3 = Conv(96, 96, 3)
        self.branch_pool = Conv(inputs, pooled)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.branch5x5_2(self.branch5x5_1(x))
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), wide, double, self.branch_pool(_average(x))], 1)  # (B, 224 + pooled, ...)


# Figure 10
class MixedB(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3 = Conv(inputs, 384, 3, stride=2, same=False)
        self.branch3x3dbl_1 = Conv(inputs, 64)
        self.branch3x3dbl_2 = Conv(64, 96, 3)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2, same=False)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)], 1)  # (B, 480 + inputs, H/2, W/2)


# Figure 6 with n = 7
class MixedC(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        row, column = (1, 7), (7, 1)
        self.branch1x1 = Conv(768, 192)
        self.branch7x7_1 = Conv(768, inner)
        self.branch7x7_2 = Conv(inner, inner, row)
        self.branch7x7_3 = Conv(inner, 192, column)
        self.branch7x7dbl_1 = Conv(768, inner)
        self.branch7x7dbl_2 = Conv(inner, inner, column)
        self.branch7x7dbl_3 = Conv(inner, inner, row)
        self.branch7x7dbl_4 = Conv(inner, inner, column)
        self.branch7x7dbl_5 = Conv(inner, 192, row)
        self.branch_pool = Conv(768, 192)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), single, double, self.branch_pool(_average(x))], 1)  # (B, 768, 17, 17)


class MixedD(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch3x3_1 = Conv(768, 192)
        self.branch3x3_2 = Conv(192, 320, 3, stride=2, same=False)
        self.branch7x7x3_1 = Conv(768, 192)
        self.branch7x7x3_2 = Conv(192, 192, (1, 7))
        self.branch7x7x3_3 = Conv(192, 192, (7, 1))
        self.branch7x7x3_4 = Conv(192, 192, 3, stride=2, same=False)

    def forward(self, x: Tensor) -> Tensor:
        small = self.branch3x3_2(self.branch3x3_1(x))
        large = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([small, large, F.max_pool2d(x, 3, stride=2)], 1)  # (B, 1280, 8, 8)


# Figure 7
class MixedE(nn.Module):
    def __init__(self, inputs: int, *, maximum: bool) -> None:
        super().__init__()
        row, column = (1, 3), (3, 1)
        self.maximum = maximum
        self.branch1x1 = Conv(inputs, 320)
        self.branch3x3_1 = Conv(inputs, 384)
        self.branch3x3_2a = Conv(384, 384, row)
        self.branch3x3_2b = Conv(384, 384, column)
        self.branch3x3dbl_1 = Conv(inputs, 448)
        self.branch3x3dbl_2 = Conv(448, 384, 3)
        self.branch3x3dbl_3a = Conv(384, 384, row)
        self.branch3x3dbl_3b = Conv(384, 384, column)
        self.branch_pool = Conv(inputs, 192)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.maximum else _average(x)
        parts = [self.branch1x1(x), self.branch3x3_2a(single), self.branch3x3_2b(single)]
        parts += [self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double), self.branch_pool(pooled)]
        return torch.cat(parts, 1)  # (B, 2048, 8, 8)


class InceptionV3(nn.Module):
    """(B, 3, 299, 299) from `inception_pixels` -> 2048 features, 2023 spatial ones, 1008 probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2, same=False)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3, same=False)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3)
        self.Conv2d_3b_1x1 = Conv(64, 80)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3, same=False)
        self.Mixed_5b = MixedA(192, 32)
        self.Mixed_5c = MixedA(256, 64)
        self.Mixed_5d = MixedA(288, 64)
        self.Mixed_6a = MixedB(288)
        self.Mixed_6b = MixedC(128)
        self.Mixed_6c = MixedC(160)
        self.Mixed_6d = MixedC(160)
        self.Mixed_6e = MixedC(192)
        self.Mixed_7a = MixedD()
        self.Mixed_7b = MixedE(1280, maximum=False)
        self.Mixed_7c = MixedE(2048, maximum=True)
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Activations:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))  # (B, 64, 147, 147)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, stride=2)))  # (B, 192, 71, 71)
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(x, 3, stride=2))))  # (B, 288, 35, 35)
        x = self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))  # (B, 768, 17, 17)
        # `mixed_6/conv` of the graph, flattened in NHWC order as in published statistics
        spatial = self.Mixed_6d.branch1x1(x)[:, :SPATIAL_CHANNELS]  # (B, 7, 17, 17)
        spatial = spatial.permute(0, 2, 3, 1).flatten(1)  # (B, 2023)
        x = self.Mixed_6e(self.Mixed_6d(x))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))  # (B, 2048, 8, 8)
        pool = x.mean((2, 3))  # (B, 2048)
        return Activations(pool, spatial, (pool @ self.fc.weight.T).softmax(-1))
