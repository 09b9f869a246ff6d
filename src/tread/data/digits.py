"""Scikit-learn's handwritten digits, which need no download.

- 1,797 images of 8 x 8 in 10 classes, inside the scikit-learn package.
- The whole set is a 460 kB tensor; reading a sample is a slice of it.
- No augmentation: a mirrored digit is not a digit.
"""

import torch
from torch import Tensor

from tread.data.dataset import Dataset, to_uint8
from tread.errors import needs


class Digits(Dataset):
    """`Digits()[i]` is (1, 8, 8) in [-1, 1] and the digit."""

    shape = (1, 8, 8)
    num_classes = 10

    def __init__(self) -> None:
        with needs("the built-in digits need scikit-learn", "demo"):
            from sklearn.datasets import load_digits
        pixels, labels = load_digits(return_X_y=True)
        pixels = torch.as_tensor(pixels, dtype=torch.float32)  # (N, 64), 0..16
        self._images = pixels.view(-1, *self.shape) / 8 - 1  # (N, 1, 8, 8)
        self._labels: list[int] = torch.as_tensor(labels).tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], self._labels[index]

    def prepare(self, x: Tensor, seed: int, positions: Tensor) -> Tensor:
        return x

    @staticmethod
    def to_images(x: Tensor) -> Tensor:
        return to_uint8(x)
