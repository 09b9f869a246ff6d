"""Unreadable samples: each is replaced by the next readable one, and listed in a file.

- The replacement comes from the same subset, so a held-out sample is never trained on, and a run on the same files sees
  the same samples however often it is resumed.
- If more than `SHARE` of a subset (`FEW` samples of a small one) are unreadable, the run ends with an error.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from tread.data.dataset import Dataset
from tread.errors import DataError, RemoteError
from tread.files import writing

SHARE, FEW = 0.01, 10
SKIPPED_FILE = "skipped.txt"


class Readable(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The samples of `dataset` at `indices`; those that cannot be read are listed in `file`."""

    def __init__(self, dataset: Dataset, indices: Sequence[int], file: Path) -> None:
        self.dataset, self.indices, self._file = dataset, indices, file
        self._most = max(FEW, int(SHARE * len(indices)))
        self._unreadable: set[int] = set()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        candidate = index
        while True:
            try:
                return self.dataset[self.indices[candidate]]
            except RemoteError:  # the network fails, not the sample
                raise
            except DataError as error:
                self._leave_out(candidate, error)  # raises before every sample is left out
            candidate = (candidate + 1) % len(self)

    def _leave_out(self, position: int, error: DataError) -> None:
        """List and report a sample once; raise a DataError if too many are unreadable."""
        if position not in self._unreadable:
            self._unreadable.add(position)
            line = f"{error}\n"
            # other processes append to this file, and may have listed this sample
            with writing(self._file), self._file.open("a+") as file:
                file.seek(0)
                if line not in file:
                    file.write(line)
                    tqdm.write(f"{error}. The next one stands for it; {self._file} lists all.", file=sys.stderr)
        if len(self._unreadable) > self._most or len(self._unreadable) == len(self):
            raise DataError(f"{len(self._unreadable)} of {len(self)} samples cannot be read, the last: {error}")
